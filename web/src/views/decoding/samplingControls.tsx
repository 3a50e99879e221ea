/** Sliders for the sampling parameters. */

import { useMemo } from "preact/hooks";
import { Slider } from "../../components/controls.tsx";
import type { SamplingParams } from "../../filters.ts";

export const DEFAULT_SAMPLING: SamplingParams = { temperature: 1, topK: 0, topP: 1, minP: 0 };

interface Props {
  params: SamplingParams;
  vocabSize: number;
  onChange(params: SamplingParams): void;
}

export function SamplingControls({ params, vocabSize, onChange }: Props) {
  const topKSteps = useMemo(() => topKValues(vocabSize), [vocabSize]);
  const topKIndex = params.topK === 0 ? topKSteps.length : topKSteps.findIndex((k) => k >= params.topK);
  const isDefault = Object.entries(DEFAULT_SAMPLING).every(
    ([name, value]) => params[name as keyof SamplingParams] === value,
  );
  return (
    <div class="sampling" role="group" aria-label="Sampling parameters">
      <Slider
        label="temperature"
        value={params.temperature}
        min={0.05}
        max={2}
        step={0.05}
        valueText={params.temperature.toFixed(2)}
        hint="Below 1 sharpens the distribution, above 1 flattens it"
        onChange={(temperature) => onChange({ ...params, temperature })}
      />
      <Slider
        label="top-k"
        value={topKIndex < 0 ? topKSteps.length : topKIndex}
        min={0}
        max={topKSteps.length}
        step={1}
        valueText={params.topK === 0 ? "all" : params.topK.toLocaleString("en")}
        hint="Keep the k most likely tokens"
        onChange={(n) => onChange({ ...params, topK: topKSteps[n] ?? 0 })}
      />
      <Slider
        label="top-p"
        value={params.topP}
        min={0.01}
        max={1}
        step={0.01}
        valueText={params.topP.toFixed(2)}
        hint="Keep the most likely tokens with this total probability"
        onChange={(topP) => onChange({ ...params, topP })}
      />
      <Slider
        label="min-p"
        value={params.minP}
        min={0}
        max={0.5}
        step={0.005}
        valueText={params.minP.toFixed(3)}
        hint="Keep the tokens at least this many times as likely as the most likely one"
        onChange={(minP) => onChange({ ...params, minP })}
      />
      <button type="button" class="plain" disabled={isDefault} onClick={() => onChange(DEFAULT_SAMPLING)}>
        Reset
      </button>
    </div>
  );
}

/** 1, 2, 3, … 10, 20, … up to the vocabulary size: finer steps for small values. */
function topKValues(vocabSize: number): number[] {
  const values: number[] = [];
  for (let power = 1; power < vocabSize; power *= 10) {
    for (let n = 1; n < 10; n++) if (n * power < vocabSize) values.push(n * power);
  }
  return values;
}
