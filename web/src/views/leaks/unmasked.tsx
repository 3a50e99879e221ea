/** The causal mask taken away: what the model then reads, and how its loss falls for the wrong reason. */

import { useMemo, useState } from "preact/hooks";
import type { Token, Unmasked } from "../../api.ts";
import { Bits, bytes, floats } from "../../wire.ts";
import { type Cluster, clusters, label } from "../../graphemes.ts";
import { Held } from "../../store.ts";
import { labelsOf } from "../../map/labels.ts";
import type { Point } from "../../map/matrix.ts";
import { WholeMap } from "../../map/inMemoryMap.ts";
import { Notice, Switch } from "../../components/controls.tsx";
import { digits, Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { TextFields } from "../../components/textFields.tsx";
import { useAnswer, useTexts } from "../../shell/hooks.ts";

const SHOWN = 200; // tokens whose loss is drawn

export function WithoutMask() {
  const [texts] = useTexts();
  const [masked, setMasked] = useState(true);
  const { answer, error, busy } = useAnswer("unmasked", texts);
  return (
    <section aria-label="Without the mask">
      <h2>Without the mask</h2>
      <p class="prose">A model that may look ahead reads its answer instead of finding it. Switch the mask off and see.</p>
      <TextFields act="Measure" busy={busy} />
      <div class="bar">
        <Switch label="Causal mask" on={masked} onChange={setMasked} />
      </div>
      <Notice error={error} busy={busy && answer === null}>
        The model reads it twice …
      </Notice>
      {answer !== null && error === "" && <Both answer={answer} masked={masked} />}
    </section>
  );
}

function Both({ answer, masked }: { answer: Unmasked; masked: boolean }) {
  const { rows, columns, before_u8, after_u8 } = answer.reads;
  const maps = useMemo(() => {
    const past = lower(rows, columns),
      [before, after] = [bytes(before_u8), bytes(after_u8)];
    return { before: new WholeMap(rows, columns, before, past), after: new WholeMap(rows, columns, after, past) };
  }, [answer]);
  const losses = useMemo(() => ({ with: floats(answer.with_f32), without: floats(answer.without_f32) }), [answer]);
  const labels = useMemo(() => labelsOf(shownOf(answer)), [answer]);
  const pointed = useMemo(() => new Held<Point>({ row: null, column: null }), []);
  const map = masked ? maps.before : maps.after;
  const [kept, lost] = [mean(losses.with), mean(losses.without)];
  return (
    <>
      <p class="note">{answer.words}</p>
      <div class="columns">
        <section class="panel" aria-label="What it reads">
          <h3>
            What it reads <span class="quiet">mean of all layers and heads, {masked ? "with the mask" : "without it"}</span>
          </h3>
          <MapCanvas
            title={masked ? "Reading with the mask" : "Reading without the mask"}
            data={map}
            rows={labels}
            columns={labels}
            pointed={pointed}
            onPoint={(at) => pointed.set(at ?? { row: null, column: null })}
            tallest={460}
          />
          <Legend high={digits(map.top())} />
        </section>
        <section aria-label="Loss of each token">
          <h3>
            Loss of each token <span class="quiet">lower is better, if it is honest</span>
          </h3>
          <p class="large">
            {(masked ? kept : lost).toFixed(3)}
            <span class="quiet">
              {" "}
              mean, {masked ? `without the mask ${lost.toFixed(3)}` : `with the mask ${kept.toFixed(3)}`}
            </span>
          </p>
          <Losses answer={answer} now={masked ? losses.with : losses.without} other={masked ? losses.without : losses.with} />
        </section>
      </div>
    </>
  );
}

/** Bars: as the switch stands. Lines: as it would be the other way. */
function Losses({ answer, now, other }: { answer: Unmasked; now: Float32Array; other: Float32Array }) {
  const shift = Math.max(0, answer.tokens.length - now.length); // where the first token is asked for by nobody
  const rows = clusters(answer.tokens.slice(shift))
    .slice(0, SHOWN)
    .map((group) => ({ text: label(group.text), now: sum(now, group), other: sum(other, group) }));
  const top = Math.max(1e-9, ...rows.flatMap((row) => [row.now, row.other]).filter(Number.isFinite));
  return (
    <>
      <ol class="bars losses" aria-label="Loss of each token">
        {rows.map((row, n) => (
          <li key={n}>
            <span class="word" dir="auto">
              {row.text}
            </span>
            <span class="track">
              <span class="fill" style={{ width: `${(100 * Math.max(0, row.now)) / top}%` }} />
              <span class="tick" style={{ left: `${(100 * Math.max(0, row.other)) / top}%` }} />
            </span>
            <span class="chance">{Number.isFinite(row.now) ? row.now.toFixed(2) : "–"}</span>
          </li>
        ))}
      </ol>
      {now.length > SHOWN && <p class="quiet">The beginning of {now.length} tokens.</p>}
    </>
  );
}

/** What the model is shown: the beginning, and every token but the last; each is asked for the token after it. */
function shownOf({ tokens, reads }: Unmasked): Token[] {
  return tokens.length === reads.rows
    ? [{ id: -1, text: "start", special: true }, ...tokens.slice(0, -1)]
    : tokens.slice(0, reads.rows);
}

/** What a causal mask allows. */
function lower(rows: number, columns: number): Bits {
  const stride = (columns + 7) >> 3,
    raw = new Uint8Array(rows * stride);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column <= row && column < columns; column++) raw[row * stride + (column >> 3)] |= 128 >> (column & 7);
  }
  return new Bits(raw, rows, columns);
}

/** Tokens that are parts of one letter count together. */
function sum(values: Float32Array, group: Cluster): number {
  return values.subarray(group.first, group.end).reduce((a, b) => a + b, 0);
}

function mean(values: Float32Array): number {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length === 0 ? NaN : known.reduce((a, b) => a + b, 0) / known.length;
}
