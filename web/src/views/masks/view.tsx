/** Masks: an expression, drawn as you type it, with padding and packing, its cost and its faults. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { MaskAnswer, MaskGiven } from "../../api.ts";
import { Bits } from "../../wire.ts";
import { Held, useHeld } from "../../store.ts";
import { numbered } from "../../map/labels.ts";
import type { Point } from "../../map/matrix.ts";
import { WholeMap } from "../../map/inMemoryMap.ts";
import { NumberField, Slider } from "../../components/controls.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { useAnswer, useWord } from "../../shell/hooks.ts";
import { EXAMPLES, LENGTH } from "./examples.ts";
import { cuts, lengths } from "./packing.ts";

const PAUSE = 150; // milliseconds after the last key before it is asked
const FAULTS = 6; // that are listed

export function MasksView() {
  const [expression, sayExpression] = useWord("mask", EXAMPLES[3][0]);
  const [long, sayLong] = useWord("length", String(LENGTH));
  const [padding, setPadding] = useState({ left: 0, right: 0 });
  const [packed, setPacked] = useState("");
  const length = Math.max(1, Math.min(512, Math.round(Number(long)) || LENGTH));
  const given = useSettled<MaskGiven>(
    useMemo(() => ({ expression, length, padding, packing: lengths(packed) }), [expression, length, padding, packed]),
  );
  const { answer, error, busy } = useAnswer("mask", given.expression.trim() === "" ? null : given);
  return (
    <>
      <div class="bar wrap">
        <label class="text line">
          <span>Who may look at whom</span>
          <input
            type="text"
            class="code"
            value={expression}
            spellcheck={false}
            autocomplete="off"
            autocapitalize="off"
            aria-invalid={error !== ""}
            aria-describedby="keepleft-mask-error"
            onInput={(event) => sayExpression(event.currentTarget.value)}
          />
        </label>
      </div>
      <p class={error === "" ? "quiet under" : "error under"} id="keepleft-mask-error" role="status">
        {error !== ""
          ? error
          : expression.trim() === ""
            ? "Write a mask, or take one of these."
            : busy || answer === null
              ? " "
              : `read as ${answer.mask}`}
      </p>
      <div class="chips" role="group" aria-label="Examples">
        {EXAMPLES.map(([text, says]) => (
          <button
            type="button"
            key={text}
            class={text === expression ? "chip on" : "chip"}
            title={says}
            onClick={() => sayExpression(text)}
          >
            <code>{text}</code>
          </button>
        ))}
      </div>
      <div class="bar">
        <Slider
          label="positions"
          value={length}
          least={1}
          most={128}
          step={1}
          shown={String(length)}
          onChange={(n) => sayLong(String(n))}
        />
        <NumberField
          label="Padding left"
          value={padding.left}
          least={0}
          most={length - 1}
          onChange={(left) => setPadding({ ...padding, left })}
        />
        <NumberField
          label="Padding right"
          value={padding.right}
          least={0}
          most={length - 1}
          onChange={(right) => setPadding({ ...padding, right })}
        />
        <label class="choice">
          <span>Packed texts</span>
          <input
            type="text"
            aria-label="Packed texts"
            value={packed}
            placeholder="6, 5, 5"
            inputMode="numeric"
            onInput={(event) => setPacked(event.currentTarget.value)}
          />
        </label>
      </div>
      {answer !== null && <Drawn answer={answer} given={given} stale={error !== ""} />}
    </>
  );
}

function Drawn({ answer, given, stale }: { answer: MaskAnswer; given: MaskGiven; stale: boolean }) {
  const map = useMemo(() => WholeMap.of(Bits.read(answer.seen_bits, answer.rows, answer.columns)), [answer]);
  const labels = useMemo(() => ({ rows: numbered(answer.rows), columns: numbered(answer.columns) }), [answer]);
  const lines = useMemo(() => cuts(given.packing, given.padding.left, answer.rows), [given, answer]);
  const pointed = useMemo(() => new Held<Point>({ row: null, column: null }), []);
  const point = useHeld(pointed);
  const at = point.row === null || point.column === null ? null : map.at(point.row, point.column);
  return (
    <div class={stale ? "columns mask-sheet stale" : "columns mask-sheet"}>
      <div>
        <MapCanvas
          title={`Mask ${answer.mask}`}
          data={map}
          rows={labels.rows}
          columns={labels.columns}
          pointed={pointed}
          cuts={lines}
          tallest={560}
          onPoint={(to) => pointed.set(to ?? { row: null, column: null })}
        />
        <p class="readout" role="status">
          {at === null
            ? "Rows look, columns are looked at. Filled: may look. Hatched: may not."
            : `Position ${point.row} ${at.allowed ? "may" : "may not"} look at position ${point.column}.`}
        </p>
      </div>
      <aside>
        <h3>Cost</h3>
        <p class="large">{(100 * answer.cost.share).toFixed(answer.cost.share < 0.1 ? 1 : 0)} %</p>
        <p class="quiet">
          {answer.cost.seen.toLocaleString("en")} of {answer.cost.all.toLocaleString("en")} pairs. {answer.cost.words}
        </p>
        <h3>Faults</h3>
        {answer.faults.length === 0 ? (
          <p class="quiet">None: every position sees something, and none its future.</p>
        ) : (
          <ul class="faults">
            {answer.faults.slice(0, FAULTS).map((fault) => (
              <li key={fault}>{fault}</li>
            ))}
            {answer.faults.length > FAULTS && (
              <li class="quiet">and {(answer.faults.length - FAULTS).toLocaleString("en")} more</li>
            )}
          </ul>
        )}
      </aside>
    </div>
  );
}

/** The same, once it has been left alone for a moment. */
function useSettled<T>(value: T): T {
  const [settled, set] = useState(value);
  useEffect(() => {
    const wait = window.setTimeout(() => set(value), PAUSE);
    return () => window.clearTimeout(wait);
  }, [value]);
  return settled;
}
