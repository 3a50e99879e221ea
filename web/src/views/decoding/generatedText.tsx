/** The text so far: what was given, and what was added token by token. */

import { useMemo } from "preact/hooks";
import type { Token } from "../../api.ts";
import { clusters, loose, together } from "../../graphemes.ts";
import { printed, tongue } from "../../components/tokenStrip.tsx";

interface Props {
  prompt: Token[];
  written: Token[];
  ended: boolean;
  onBack(to: number): void;
}

export function WrittenText({ prompt, written, ended, onBack }: Props) {
  const given = useMemo(() => together(prompt), [prompt]);
  const added = useMemo(() => clusters(written), [written]);
  const apart = useMemo(() => loose([...prompt, ...written]), [prompt, written]);
  return (
    <div class={apart ? "written loose" : "written"} dir="auto" lang={tongue([...prompt, ...written])} aria-live="polite">
      <span class="given">{apart ? `${given} ` : given}</span>
      {added.map((group) => (
        <button
          type="button"
          key={group.first}
          class={group.special ? "token special" : "token"}
          title="Go back to before this token"
          onClick={() => onBack(group.first)}
        >
          {printed(group.text)}
        </button>
      ))}
      {ended ? <span class="quiet"> The text has ended.</span> : <span class="caret" aria-hidden="true" />}
    </div>
  );
}
