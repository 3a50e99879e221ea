/** The next token: how likely each is, before and after the sliders. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Dials, drawn, entropy, narrowed } from "../../filters.ts";
import { label } from "../../graphemes.ts";
import { DialSliders, NEUTRAL } from "./samplingControls.tsx";
import type { Ranking } from "./useDecoding.ts";

const SHOWN = 20;

interface Props {
  ranking: Ranking;
  words: string[] | null;
  ends: number[];
  dials: Dials;
  busy: boolean;
  ended: boolean;
  onDials(dials: Dials): void;
  onChoose(id: number): void;
  onBack(): void;
}

export function Distribution({ ranking, words, ends, dials, busy, ended, onDials, onChoose, onBack }: Props) {
  const { scores, order } = ranking;
  const before = useMemo(() => narrowed(scores, order, NEUTRAL), [scores, order]);
  const after = useMemo(() => narrowed(scores, order, dials), [scores, order, dials]);
  const spread = useMemo(() => entropy(after.chances), [after]);
  const [at, go] = useState(0);
  const list = useRef<HTMLOListElement>(null);
  useEffect(() => go(0), [ranking]);
  const top = Math.max(before.chances[0], after.chances[0]);
  const rows = Math.min(SHOWN, order.length);
  const name = (id: number) => words?.[id] ?? `#${id}`;

  const press = (event: KeyboardEvent) => {
    if (event.key === "ArrowDown") go(Math.min(rows - 1, at + 1));
    else if (event.key === "ArrowUp") go(Math.max(0, at - 1));
    else if (event.key === "Enter" && !ended) onChoose(order[at]);
    else if (event.key === "Backspace") onBack();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  useEffect(() => {
    if (list.current?.matches(":focus-visible")) list.current.children[at]?.scrollIntoView({ block: "nearest" });
  }, [at]);

  return (
    <section class="distribution" aria-label="The next token" aria-busy={busy}>
      <div class="row">
        <h3>The next token</h3>
        <p class="quiet">
          {after.kept.toLocaleString("en")} of {order.length.toLocaleString("en")} left, {spread.toFixed(2)} bits
        </p>
        <button type="button" disabled={busy || ended} onClick={() => onChoose(order[drawn(after.chances, Math.random())])}>
          Draw one
        </button>
      </div>
      <DialSliders dials={dials} vocab={order.length} onChange={onDials} />
      <ol
        ref={list}
        class="bars"
        role="listbox"
        aria-label="The likeliest tokens"
        tabIndex={0}
        aria-activedescendant={`keepleft-next-${at}`}
        onKeyDown={press}
      >
        {Array.from({ length: rows }, (_, n) => {
          const id = order[n],
            kept = n < after.kept;
          return (
            <li
              key={id}
              id={`keepleft-next-${n}`}
              role="option"
              aria-selected={n === at}
              class={`${kept ? "" : "out"}${n === at ? " at" : ""}`}
              aria-label={`${name(id).trim() || "space"}, ${kept ? percent(after.chances[n]) : "cut off"}`}
              onClick={() => !ended && onChoose(id)}
              onPointerEnter={() => go(n)}
            >
              <span class="word" dir="auto">
                {ends.includes(id) ? <i>{label(name(id))} (end)</i> : label(name(id))}
              </span>
              <span class="track">
                <span class="fill" style={{ width: `${(100 * after.chances[n]) / top}%` }} />
                <span class="tick" style={{ left: `${(100 * before.chances[n]) / top}%` }} />
              </span>
              <span class="chance">{kept ? percent(after.chances[n]) : "cut off"}</span>
            </li>
          );
        })}
      </ol>
      <p class="quiet">
        Bars: with the sliders. Lines: as the model scored them. Choose one by a click, or by arrow keys and Enter.
      </p>
    </section>
  );
}

function percent(chance: number): string {
  return chance >= 0.1 ? `${(100 * chance).toFixed(1)} %` : chance >= 0.0001 ? `${(100 * chance).toFixed(2)} %` : "< 0.01 %";
}
