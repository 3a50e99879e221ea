/** A server that wants a key: a field for it, kept for this window alone. */

import { useEffect, useRef, useState } from "preact/hooks";

export interface Lock {
  again: boolean; // one was given, and it was wrong
  give(key: string): void;
}

export function LockSheet({ lock }: { lock: Lock | null }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [key, type] = useState("");
  useEffect(() => {
    if (lock !== null) dialog.current!.showModal();
    else dialog.current!.close();
  }, [lock]);
  return (
    <dialog ref={dialog} class="sheet" aria-labelledby="keepleft-lock" onCancel={(event) => event.preventDefault()}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          lock?.give(key);
        }}
      >
        <h2 id="keepleft-lock">This server wants a key</h2>
        <p>{lock?.again ? "That key was refused. Try another." : "It is kept until this window is closed."}</p>
        <div class="row">
          <input
            type="password"
            aria-label="Key"
            autocomplete="off"
            value={key}
            onInput={(event) => type(event.currentTarget.value)}
          />
          <button type="submit">Open</button>
        </div>
      </form>
    </dialog>
  );
}
