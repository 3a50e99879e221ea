/** The input fields: a text, and a source for an encoder-decoder. */

import { useEffect, useState } from "preact/hooks";
import type { Texts } from "../api.ts";
import { useExplorer, useTexts } from "../shell/hooks.ts";
import { SnapshotTransport } from "../transport/snapshot.ts";
import { detectLanguage } from "./tokenStrip.tsx";

interface Props {
  submitLabel: string;
  isLoading?: boolean;
  showTarget?: boolean; // of an encoder-decoder; without it the target is generated
  onSubmit?(texts: Texts): void;
}

export function TextFields({ submitLabel, isLoading = false, showTarget = true, onSubmit }: Props) {
  const { modelInfo, transport } = useExplorer();
  const isEncoderDecoder = modelInfo.family === "encoder-decoder";
  const [texts, setTexts] = useTexts();
  const [draft, setDraft] = useState(texts);
  useEffect(() => setDraft(texts), [texts]);
  const submit = () => {
    setTexts(draft);
    onSubmit?.(draft);
  };
  if (transport instanceof SnapshotTransport) {
    const shownTexts = isEncoderDecoder ? [texts.source, showTarget ? texts.text : ""] : [texts.text];
    return (
      <p class="muted" dir="auto">
        {shownTexts.filter(Boolean).join(" → ")}
      </p>
    );
  }
  const field = (name: "text" | "source", label: string, placeholder: string) => (
    <label class="text">
      <span>{label}</span>
      <textarea
        rows={2}
        aria-label={label}
        value={draft[name]}
        placeholder={placeholder}
        dir="auto"
        lang={detectLanguage([{ text: draft[name] ?? "" }])}
        spellcheck={false}
        onInput={(event) => setDraft({ ...draft, [name]: event.currentTarget.value })}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
          event.preventDefault();
          submit();
        }}
      />
    </label>
  );
  return (
    <form
      class="text-fields"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      {isEncoderDecoder && field("source", "Source", "Text for the encoder")}
      {isEncoderDecoder && showTarget && field("text", "Target", "Leave empty to let the model generate it")}
      {!isEncoderDecoder && field("text", "Text", "Text for the model")}
      <button type="submit" disabled={isLoading}>
        {isLoading ? "Loading …" : submitLabel}
      </button>
    </form>
  );
}
