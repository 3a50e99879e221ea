/** The list of keyboard shortcuts, which `?` opens. */

import { useEffect, useRef } from "preact/hooks";

const SHORTCUTS: [keys: string[], action: string][] = [
  [["1", "2", "…"], "select a view"],
  [["←", "→"], "on the tabs: previous or next view"],
  [["+", "−"], "on a map: zoom in or out"],
  [["←", "↑", "→", "↓"], "on a map: pan; with Shift by more"],
  [["0"], "on a map: fit to view"],
  [["←", "→"], "on tokens: previous or next token"],
  [["↑", "↓", "Enter"], "on next tokens: select one, append it"],
  [["Backspace"], "on next tokens: remove the last token"],
  [["Ctrl", "Enter"], "in a text field: run"],
  [["d"], "toggle dark theme"],
  [["?"], "show or hide this list"],
  [["Esc"], "close this list"],
];

export function ShortcutDialog({ open, onClose }: { open: boolean; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open && !dialog.current!.open) dialog.current!.showModal();
    if (!open && dialog.current!.open) dialog.current!.close();
  }, [open]);
  return (
    <dialog ref={dialog} class="dialog" aria-labelledby="keepleft-shortcuts" onClose={onClose}>
      <h2 id="keepleft-shortcuts">Keyboard shortcuts</h2>
      <dl class="shortcuts">
        {SHORTCUTS.map(([keys, action]) => [
          <dt>{keys.map((key) => (key === "…" ? "…" : <kbd>{key}</kbd>))}</dt>,
          <dd>{action}</dd>,
        ])}
      </dl>
      <button type="button" class="plain" onClick={onClose}>
        Close
      </button>
    </dialog>
  );
}

/** True while the user types text, so that letters are not shortcuts. */
export function isTyping(event: KeyboardEvent): boolean {
  const target = event.composedPath()[0] as HTMLElement;
  const inputType = target.tagName === "INPUT" ? (target as HTMLInputElement).type : null;
  return (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    target.isContentEditable ||
    ["TEXTAREA", "SELECT"].includes(target.tagName) ||
    (inputType !== null && !["checkbox", "radio", "button"].includes(inputType))
  );
}
