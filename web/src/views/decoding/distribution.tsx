/** The next-token distribution, before and after the sampling filters. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { entropy, filterLogits, sampleIndex, type SamplingParams } from "../../filters.ts";
import { displayLabel } from "../../graphemes.ts";
import { DEFAULT_SAMPLING, SamplingControls } from "./samplingControls.tsx";
import type { RankedLogits } from "./useDecoding.ts";

const MAX_TOKENS_SHOWN = 20;

interface Props {
  ranked: RankedLogits;
  vocabulary: string[] | null;
  eosIds: number[];
  sampling: SamplingParams;
  isLoading: boolean;
  isFinished: boolean;
  onSamplingChange(sampling: SamplingParams): void;
  onSelect(id: number): void;
  onUndo(): void;
}

export function Distribution({
  ranked,
  vocabulary,
  eosIds,
  sampling,
  isLoading,
  isFinished,
  onSamplingChange,
  onSelect,
  onUndo,
}: Props) {
  const { logits, order } = ranked;
  const unfiltered = useMemo(() => filterLogits(logits, order, DEFAULT_SAMPLING), [logits, order]);
  const filtered = useMemo(() => filterLogits(logits, order, sampling), [logits, order, sampling]);
  const entropyBits = useMemo(() => entropy(filtered.probabilities), [filtered]);
  const [selected, setSelected] = useState(0);
  const list = useRef<HTMLOListElement>(null);
  useEffect(() => setSelected(0), [ranked]);
  const maxProbability = Math.max(unfiltered.probabilities[0], filtered.probabilities[0]);
  const rows = Math.min(MAX_TOKENS_SHOWN, order.length);
  const tokenText = (id: number) => vocabulary?.[id] ?? `#${id}`;

  const sample = () => onSelect(order[sampleIndex(filtered.probabilities, Math.random())]);
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "ArrowDown") setSelected(Math.min(rows - 1, selected + 1));
    else if (event.key === "ArrowUp") setSelected(Math.max(0, selected - 1));
    else if (event.key === "Enter" && !isFinished) onSelect(order[selected]);
    else if (event.key === "Backspace") onUndo();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  useEffect(() => {
    if (!list.current?.matches(":focus-visible")) return;
    list.current.children[selected]?.scrollIntoView({ block: "nearest" });
  }, [selected]);

  return (
    <section class="distribution" aria-label="Next token" aria-busy={isLoading}>
      <div class="row">
        <h3>Next token</h3>
        <p class="muted">
          {filtered.kept.toLocaleString("en")} of {order.length.toLocaleString("en")} tokens, entropy{" "}
          {entropyBits.toFixed(2)} bits
        </p>
        <button type="button" disabled={isLoading || isFinished} onClick={sample}>
          Sample one
        </button>
      </div>
      <SamplingControls params={sampling} vocabSize={order.length} onChange={onSamplingChange} />
      <ol
        ref={list}
        class="bars"
        role="listbox"
        aria-label="Most likely tokens"
        tabIndex={0}
        aria-activedescendant={`keepleft-next-${selected}`}
        onKeyDown={onKeyDown}
      >
        {Array.from({ length: rows }, (_, n) => {
          const id = order[n],
            isKept = n < filtered.kept,
            probability = isKept ? formatPercent(filtered.probabilities[n]) : "filtered",
            tokenLabel = displayLabel(tokenText(id)),
            width = (100 * filtered.probabilities[n]) / maxProbability,
            unfilteredWidth = (100 * unfiltered.probabilities[n]) / maxProbability;
          return (
            <li
              key={id}
              id={`keepleft-next-${n}`}
              role="option"
              aria-selected={n === selected}
              class={`${isKept ? "" : "filtered"}${n === selected ? " selected" : ""}`}
              aria-label={`${tokenText(id).trim() || "space"}, ${probability}`}
              onClick={() => !isFinished && onSelect(id)}
              onPointerEnter={() => setSelected(n)}
            >
              <span class="token-text" dir="auto">
                {eosIds.includes(id) ? <i>{tokenLabel} (EOS)</i> : tokenLabel}
              </span>
              <span class="track">
                <span class="fill" style={{ width: `${width}%` }} />
                <span class="tick" style={{ left: `${unfilteredWidth}%` }} />
              </span>
              <span class="value">{probability}</span>
            </li>
          );
        })}
      </ol>
      <p class="muted">
        Bars: probability after filtering. Lines: before filtering. Click a token to append it, or use the
        arrow keys and Enter.
      </p>
    </section>
  );
}

function formatPercent(probability: number): string {
  if (probability < 0.0001) return "< 0.01 %";
  return `${(100 * probability).toFixed(probability >= 0.1 ? 1 : 2)} %`;
}
