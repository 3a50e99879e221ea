/** The text so far: what was given, and what was added token by token. */

import { useMemo } from "preact/hooks";
import type { Token } from "../../answers.ts";
import { clusters } from "../../graphemes.ts";
import { tongue } from "../../parts/tokens.tsx";

interface Props {
  prompt: Token[];
  written: Token[];
  ended: boolean;
  onBack(to: number): void;
}

export function WrittenText({ prompt, written, ended, onBack }: Props) {
  const given = useMemo(() => clusters(prompt).map((group) => group.text).join(""), [prompt]);
  const added = useMemo(() => clusters(written), [written]);
  return (
    <div class="written" dir="auto" lang={tongue([...prompt, ...written])} aria-live="polite">
      <span class="given">{given}</span>
      {added.map((group) => (
        <button type="button" key={group.first} class={group.special ? "token special" : "token"} title="Go back to before this token"
                onClick={() => onBack(group.first)}>{group.text === "" ? "∅" : group.text}</button>
      ))}
      {ended ? <span class="quiet"> The text has ended.</span> : <span class="caret" aria-hidden="true" />}
    </div>
  );
}
