/** The masks view: a mask expression with padding and packing, drawn as you type; its cost and faults. */

import { useMemo, useState } from "preact/hooks";
import type { MaskAnswer, MaskParams } from "../../api.ts";
import { NumberField, Slider } from "../../components/controls.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { InMemoryMap } from "../../map/inMemoryMap.ts";
import { positionLabels } from "../../map/labels.ts";
import type { CellPosition } from "../../map/matrix.ts";
import { useDebounced, useQuery, useUrlParam } from "../../shell/hooks.ts";
import { Store, useStore } from "../../store.ts";
import { BitMatrix } from "../../wire.ts";
import { EXAMPLE_LENGTH, EXAMPLES } from "./examples.ts";
import { parseLengths, segmentBoundaries } from "./packing.ts";

const DEBOUNCE_MS = 150; // after the last key press
const MAX_FAULTS_SHOWN = 6;

export function MasksView() {
  const [expression, setExpression] = useUrlParam("mask", EXAMPLES[3][0]);
  const [lengthParam, setLength] = useUrlParam("length", String(EXAMPLE_LENGTH));
  const [padding, setPadding] = useState({ left: 0, right: 0 });
  const [packingText, setPackingText] = useState("");
  const length = Math.max(1, Math.min(512, Math.round(Number(lengthParam)) || EXAMPLE_LENGTH));
  const params = useDebounced<MaskParams>(
    useMemo(
      () => ({ expression, length, padding, packing: parseLengths(packingText) }),
      [expression, length, padding, packingText],
    ),
    DEBOUNCE_MS,
  );
  const { answer, error, isLoading } = useQuery("mask", params.expression.trim() === "" ? null : params);
  return (
    <>
      <div class="bar wrap">
        <label class="text line">
          <span>Mask expression</span>
          <input
            type="text"
            class="code"
            value={expression}
            spellcheck={false}
            autocomplete="off"
            autocapitalize="off"
            aria-invalid={error !== ""}
            aria-describedby="keepleft-mask-error"
            onInput={(event) => setExpression(event.currentTarget.value)}
          />
        </label>
      </div>
      <p
        class={error === "" ? "muted field-status" : "error field-status"}
        id="keepleft-mask-error"
        role="status"
      >
        {error !== ""
          ? error
          : expression.trim() === ""
            ? "Enter a mask, or choose an example."
            : isLoading || answer === null
              ? " "
              : `parsed as ${answer.mask}`}
      </p>
      <div class="chips" role="group" aria-label="Examples">
        {EXAMPLES.map(([text, description]) => (
          <button
            type="button"
            key={text}
            class={text === expression ? "chip selected" : "chip"}
            title={description}
            onClick={() => setExpression(text)}
          >
            <code>{text}</code>
          </button>
        ))}
      </div>
      <div class="bar">
        <Slider
          label="sequence length"
          value={length}
          min={1}
          max={128}
          step={1}
          valueText={String(length)}
          onChange={(n) => setLength(String(n))}
        />
        <NumberField
          label="Left padding"
          value={padding.left}
          min={0}
          max={length - 1}
          onChange={(left) => setPadding({ ...padding, left })}
        />
        <NumberField
          label="Right padding"
          value={padding.right}
          min={0}
          max={length - 1}
          onChange={(right) => setPadding({ ...padding, right })}
        />
        <label class="choice">
          <span>Packed sequences</span>
          <input
            type="text"
            aria-label="Packed sequences"
            value={packingText}
            placeholder="6, 5, 5"
            inputMode="numeric"
            onInput={(event) => setPackingText(event.currentTarget.value)}
          />
        </label>
      </div>
      {answer !== null && <MaskResult answer={answer} params={params} isStale={error !== ""} />}
    </>
  );
}

interface MaskResultProps {
  answer: MaskAnswer;
  params: MaskParams;
  isStale: boolean; // the expression has an error, and the last valid mask is shown
}

function MaskResult({ answer, params, isStale }: MaskResultProps) {
  const map = useMemo(
    () => InMemoryMap.fromBits(BitMatrix.decode(answer.visible_bits, answer.rows, answer.columns)),
    [answer],
  );
  const labels = useMemo(
    () => ({ rows: positionLabels(answer.rows), columns: positionLabels(answer.columns) }),
    [answer],
  );
  const boundaries = useMemo(
    () => segmentBoundaries(params.packing, params.padding.left, answer.rows),
    [params, answer],
  );
  const hovered = useMemo(() => new Store<CellPosition>({ row: null, column: null }), []);
  const cell = useStore(hovered);
  const value = cell.row === null || cell.column === null ? null : map.cellValue(cell.row, cell.column);
  const { visible, total, fraction, note } = answer.cost;
  const verb = value?.isAllowed ? "may" : "may not";
  return (
    <div class={isStale ? "columns mask-result stale" : "columns mask-result"}>
      <div>
        <MapCanvas
          title={`Mask ${answer.mask}`}
          data={map}
          rows={labels.rows}
          columns={labels.columns}
          hovered={hovered}
          boundaries={boundaries}
          maxHeight={560}
          onHover={(position) => hovered.set(position ?? { row: null, column: null })}
        />
        <p class="readout" role="status">
          {value === null
            ? "Rows are queries, columns are keys. Filled: may attend. Hatched: masked out."
            : `Position ${cell.row} ${verb} attend to position ${cell.column}.`}
        </p>
      </div>
      <aside>
        <h3>Cost</h3>
        <p class="key-figure">{(100 * fraction).toFixed(fraction < 0.1 ? 1 : 0)} %</p>
        <p class="muted">
          {visible.toLocaleString("en")} of {total.toLocaleString("en")} query-key pairs. {note}
        </p>
        <h3>Faults</h3>
        {answer.faults.length === 0 ? (
          <p class="muted">None: every position can attend to something, and none to its future.</p>
        ) : (
          <ul class="faults">
            {answer.faults.slice(0, MAX_FAULTS_SHOWN).map((fault) => (
              <li key={fault}>{fault}</li>
            ))}
            {answer.faults.length > MAX_FAULTS_SHOWN && (
              <li class="muted">and {(answer.faults.length - MAX_FAULTS_SHOWN).toLocaleString("en")} more</li>
            )}
          </ul>
        )}
      </aside>
    </div>
  );
}

/** The value, once it has not changed for a moment. */
