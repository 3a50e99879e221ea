/** The keys, on a sheet that `?` opens. */

import { useEffect, useRef } from "preact/hooks";

const KEYS: [keys: string[], does: string][] = [
  [["1", "…", "5"], "go to a view"],
  [["←", "→"], "on the tabs: the view before, the next"],
  [["+", "−"], "on a map: nearer, farther"],
  [["←", "↑", "→", "↓"], "on a map: move; with Shift further"],
  [["0"], "on a map: all of it"],
  [["←", "→"], "on tokens: the token before, the next; what it reads lights up"],
  [["↑", "↓", "Enter"], "on the next tokens: go through them, choose one"],
  [["Backspace"], "on the next tokens: take the last one back"],
  [["Ctrl", "Enter"], "in a text: read it"],
  [["d"], "dark or light"],
  [["?"], "this sheet"],
  [["Esc"], "close it"],
];

export function KeySheet({ open, close }: { open: boolean; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open && !dialog.current!.open) dialog.current!.showModal();
    if (!open && dialog.current!.open) dialog.current!.close();
  }, [open]);
  return (
    <dialog ref={dialog} class="sheet" aria-labelledby="keepleft-keys" onClose={close}>
      <h2 id="keepleft-keys">Keys</h2>
      <dl class="keys">
        {KEYS.map(([keys, does]) => [<dt>{keys.map((key) => (key === "…" ? "…" : <kbd>{key}</kbd>))}</dt>, <dd>{does}</dd>])}
      </dl>
      <button type="button" class="plain" onClick={close}>
        Close
      </button>
    </dialog>
  );
}

/** Is the reader writing, so that letters are letters? */
export function writing(event: KeyboardEvent): boolean {
  const at = event.composedPath()[0] as HTMLElement;
  return (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    at.isContentEditable ||
    ["TEXTAREA", "SELECT"].includes(at.tagName) ||
    (at.tagName === "INPUT" && !["checkbox", "radio", "button"].includes((at as HTMLInputElement).type))
  );
}
