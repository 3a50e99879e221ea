/** The fields for what is read: a text, and a source where the model is a pair. */

import { useEffect, useState } from "preact/hooks";
import type { Texts } from "../api.ts";
import { usePage, useTexts } from "../shell/hooks.ts";
import { RecordedSource } from "../transport/snapshot.ts";
import { tongue } from "./tokenStrip.tsx";

interface Props {
  act: string; // what the button says
  busy?: boolean;
  target?: boolean; // a pair's own text is typed too
  onAct?(texts: Texts): void;
}

export function TextFields({ act, busy = false, target = true, onAct }: Props) {
  const { about, source } = usePage();
  const pair = about.family === "encoder-decoder";
  const [texts, say] = useTexts();
  const [draft, type] = useState(texts);
  useEffect(() => type(texts), [texts]);
  const send = () => {
    say(draft);
    onAct?.(draft);
  };
  if (source instanceof RecordedSource) {
    return (
      <p class="quiet" dir="auto">
        {[pair ? texts.source : "", pair && !target ? "" : texts.text].filter(Boolean).join(" → ")}
      </p>
    );
  }
  const field = (name: "text" | "source", label: string, hint: string) => (
    <label class="text">
      <span>{label}</span>
      <textarea
        rows={2}
        aria-label={label}
        value={draft[name]}
        placeholder={hint}
        dir="auto"
        lang={tongue([{ text: draft[name] ?? "" }])}
        spellcheck={false}
        onInput={(event) => type({ ...draft, [name]: event.currentTarget.value })}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
          event.preventDefault();
          send();
        }}
      />
    </label>
  );
  return (
    <form
      class="texts"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {pair && field("source", "Source", "A text for the encoder")}
      {(!pair || target) &&
        field("text", pair ? "Target" : "Text", pair ? "Leave it empty, and the model writes one" : "A text to read")}
      <button type="submit" disabled={busy}>
        {busy ? "One moment …" : act}
      </button>
    </form>
  );
}
