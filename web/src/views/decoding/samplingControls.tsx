/** The sliders that narrow the distribution. */

import { useMemo } from "preact/hooks";
import type { Dials } from "../../filters.ts";
import { Slider } from "../../components/controls.tsx";

export const NEUTRAL: Dials = { temperature: 1, topK: 0, topP: 1, minP: 0 };

interface Props {
  dials: Dials;
  vocab: number;
  onChange(dials: Dials): void;
}

export function DialSliders({ dials, vocab, onChange }: Props) {
  const ks = useMemo(() => rungs(vocab), [vocab]);
  const at = dials.topK === 0 ? ks.length : ks.findIndex((k) => k >= dials.topK);
  const neutral = Object.entries(NEUTRAL).every(([name, value]) => dials[name as keyof Dials] === value);
  return (
    <div class="dials" role="group" aria-label="What narrows the distribution">
      <Slider
        label="temperature"
        value={dials.temperature}
        least={0.05}
        most={2}
        step={0.05}
        shown={dials.temperature.toFixed(2)}
        hint="Below 1 the likely becomes likelier"
        onChange={(temperature) => onChange({ ...dials, temperature })}
      />
      <Slider
        label="top-k"
        value={at < 0 ? ks.length : at}
        least={0}
        most={ks.length}
        step={1}
        shown={dials.topK === 0 ? "all" : dials.topK.toLocaleString("en")}
        hint="The k likeliest"
        onChange={(n) => onChange({ ...dials, topK: ks[n] ?? 0 })}
      />
      <Slider
        label="top-p"
        value={dials.topP}
        least={0.01}
        most={1}
        step={0.01}
        shown={dials.topP.toFixed(2)}
        hint="The likeliest that together have this probability"
        onChange={(topP) => onChange({ ...dials, topP })}
      />
      <Slider
        label="min-p"
        value={dials.minP}
        least={0}
        most={0.5}
        step={0.005}
        shown={dials.minP.toFixed(3)}
        hint="Those at least so many times as likely as the likeliest"
        onChange={(minP) => onChange({ ...dials, minP })}
      />
      <button type="button" class="plain" disabled={neutral} onClick={() => onChange(NEUTRAL)}>
        Reset
      </button>
    </div>
  );
}

/** 1, 2, 3, … 10, 20, … up to the vocabulary: a slider that is fine where it matters. */
function rungs(vocab: number): number[] {
  const out: number[] = [];
  for (let power = 1; power < vocab; power *= 10) {
    for (let n = 1; n < 10; n++) if (n * power < vocab) out.push(n * power);
  }
  return out;
}
