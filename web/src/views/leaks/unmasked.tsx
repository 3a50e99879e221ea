/** The model without its causal mask: its attention, and its losses next to those with the mask. */

import { useMemo, useState } from "preact/hooks";
import type { Token, UnmaskedAnswer } from "../../api.ts";
import { Status, Switch } from "../../components/controls.tsx";
import { formatWeight, Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { TextFields } from "../../components/textFields.tsx";
import { type Cluster, displayLabel, graphemeClusters } from "../../graphemes.ts";
import { InMemoryMap } from "../../map/inMemoryMap.ts";
import { tokenLabels } from "../../map/labels.ts";
import type { CellPosition } from "../../map/matrix.ts";
import { useQuery, useTexts } from "../../shell/hooks.ts";
import { Store } from "../../store.ts";
import { BitMatrix, decodeBytes, decodeFloats } from "../../wire.ts";

const MAX_TOKENS_SHOWN = 200; // whose losses are listed

export function UnmaskedComparison() {
  const [texts] = useTexts();
  const [isMasked, setIsMasked] = useState(true);
  const { answer, error, isLoading } = useQuery("unmasked", texts);
  return (
    <section aria-label="Without the mask">
      <h2>Without the mask</h2>
      <p class="prose">
        A model that can attend to the future copies the answer instead of predicting it. Turn the mask off to
        see the effect.
      </p>
      <TextFields submitLabel="Compare" isLoading={isLoading} />
      <div class="bar">
        <Switch label="Causal mask" checked={isMasked} onChange={setIsMasked} />
      </div>
      <Status error={error} isLoading={isLoading && answer === null}>
        Running the model with and without the mask …
      </Status>
      {answer !== null && error === "" && <ComparisonResult answer={answer} isMasked={isMasked} />}
    </section>
  );
}

function ComparisonResult({ answer, isMasked }: { answer: UnmaskedAnswer; isMasked: boolean }) {
  const { rows, columns, masked_u8, unmasked_u8 } = answer.maps;
  const maps = useMemo(() => {
    const causal = causalMask(rows, columns),
      [masked, unmasked] = [decodeBytes(masked_u8), decodeBytes(unmasked_u8)];
    return {
      masked: new InMemoryMap(rows, columns, masked, causal),
      unmasked: new InMemoryMap(rows, columns, unmasked, causal),
    };
  }, [answer]);
  const losses = useMemo(
    () => ({
      masked: decodeFloats(answer.masked_loss_f32),
      unmasked: decodeFloats(answer.unmasked_loss_f32),
    }),
    [answer],
  );
  const labels = useMemo(() => tokenLabels(inputTokens(answer)), [answer]);
  const hovered = useMemo(() => new Store<CellPosition>({ row: null, column: null }), []);
  const map = isMasked ? maps.masked : maps.unmasked;
  const [maskedMean, unmaskedMean] = [mean(losses.masked), mean(losses.unmasked)];
  return (
    <>
      <p class="note">{answer.note}</p>
      <div class="columns">
        <section class="panel" aria-label="Attention">
          <h3>
            Attention{" "}
            <span class="muted">
              mean of all layers and heads, {isMasked ? "with the mask" : "without the mask"}
            </span>
          </h3>
          <MapCanvas
            title={isMasked ? "Attention with the mask" : "Attention without the mask"}
            data={map}
            rows={labels}
            columns={labels}
            hovered={hovered}
            onHover={(cell) => hovered.set(cell ?? { row: null, column: null })}
            maxHeight={460}
          />
          <Legend high={formatWeight(map.maxWeight())} />
        </section>
        <section aria-label="Loss per token">
          <h3>
            Loss per token <span class="muted">lower is better, unless the model sees the future</span>
          </h3>
          <p class="key-figure">
            {(isMasked ? maskedMean : unmaskedMean).toFixed(3)}
            <span class="muted">
              {" "}
              mean,{" "}
              {isMasked
                ? `without the mask ${unmaskedMean.toFixed(3)}`
                : `with the mask ${maskedMean.toFixed(3)}`}
            </span>
          </p>
          <TokenLosses
            answer={answer}
            losses={isMasked ? losses.masked : losses.unmasked}
            otherLosses={isMasked ? losses.unmasked : losses.masked}
          />
        </section>
      </div>
    </>
  );
}

interface TokenLossesProps {
  answer: UnmaskedAnswer;
  losses: Float32Array; // drawn as bars
  otherLosses: Float32Array; // with the switch in the other position, drawn as lines
}

function TokenLosses({ answer, losses, otherLosses }: TokenLossesProps) {
  const offset = Math.max(0, answer.tokens.length - losses.length); // the first token may not be predicted
  const rows = graphemeClusters(answer.tokens.slice(offset))
    .slice(0, MAX_TOKENS_SHOWN)
    .map((cluster) => ({
      text: displayLabel(cluster.text),
      loss: sum(losses, cluster),
      otherLoss: sum(otherLosses, cluster),
    }));
  const maxLoss = Math.max(1e-9, ...rows.flatMap((row) => [row.loss, row.otherLoss]).filter(Number.isFinite));
  return (
    <>
      <ol class="bars losses" aria-label="Loss per token">
        {rows.map((row, n) => (
          <li key={n}>
            <span class="token-text" dir="auto">
              {row.text}
            </span>
            <span class="track">
              <span class="fill" style={{ width: `${(100 * Math.max(0, row.loss)) / maxLoss}%` }} />
              <span class="tick" style={{ left: `${(100 * Math.max(0, row.otherLoss)) / maxLoss}%` }} />
            </span>
            <span class="value">{Number.isFinite(row.loss) ? row.loss.toFixed(2) : "–"}</span>
          </li>
        ))}
      </ol>
      {losses.length > MAX_TOKENS_SHOWN && <p class="muted">Only the start of {losses.length} tokens.</p>}
    </>
  );
}

/** The inputs: a start token and all tokens but the last, each of which predicts the token after it. */
function inputTokens({ tokens, maps: reads }: UnmaskedAnswer): Token[] {
  return tokens.length === reads.rows
    ? [{ id: -1, text: "start", special: true }, ...tokens.slice(0, -1)]
    : tokens.slice(0, reads.rows);
}

function causalMask(rows: number, columns: number): BitMatrix {
  const stride = (columns + 7) >> 3,
    bytes = new Uint8Array(rows * stride);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column <= row && column < columns; column++) {
      bytes[row * stride + (column >> 3)] |= 128 >> (column & 7);
    }
  }
  return new BitMatrix(bytes, rows, columns);
}

/** The total loss of the tokens of one grapheme cluster. */
function sum(values: Float32Array, cluster: Cluster): number {
  return values.subarray(cluster.first, cluster.end).reduce((a, b) => a + b, 0);
}

function mean(values: Float32Array): number {
  const finite = values.filter((value) => Number.isFinite(value));
  return finite.length === 0 ? NaN : finite.reduce((a, b) => a + b, 0) / finite.length;
}
