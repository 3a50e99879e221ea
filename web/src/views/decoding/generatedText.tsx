/** The text so far: the prompt, and the tokens added to it. */

import { useMemo } from "preact/hooks";
import type { Token } from "../../api.ts";
import { detectLanguage, showWhitespace } from "../../components/tokenStrip.tsx";
import { graphemeClusters, joinTokens, omitsSpaces } from "../../graphemes.ts";

interface Props {
  prompt: Token[];
  newTokens: Token[];
  isFinished: boolean;
  onUndo(length: number): void;
}

export function GeneratedText({ prompt, newTokens, isFinished, onUndo }: Props) {
  const promptText = useMemo(() => joinTokens(prompt), [prompt]);
  const clusters = useMemo(() => graphemeClusters(newTokens), [newTokens]);
  const needsSpaces = useMemo(() => omitsSpaces([...prompt, ...newTokens]), [prompt, newTokens]);
  return (
    <div
      class={needsSpaces ? "generated-text spaced" : "generated-text"}
      dir="auto"
      lang={detectLanguage([...prompt, ...newTokens])}
      aria-live="polite"
    >
      <span class="prompt">{needsSpaces ? `${promptText} ` : promptText}</span>
      {clusters.map((cluster) => (
        <button
          type="button"
          key={cluster.first}
          class={cluster.special ? "token special" : "token"}
          title="Remove this token and all after it"
          onClick={() => onUndo(cluster.first)}
        >
          {showWhitespace(cluster.text)}
        </button>
      ))}
      {isFinished ? (
        <span class="muted"> End of sequence.</span>
      ) : (
        <span class="caret" aria-hidden="true" />
      )}
    </div>
  );
}
