/** Where in the source each written token looks: it grows with the text. */

import { useMemo, useState } from "preact/hooks";
import { bytes } from "../../wire.ts";
import { Held } from "../../store.ts";
import { labelsOf } from "../../map/labels.ts";
import type { Point } from "../../map/matrix.ts";
import { WholeMap } from "../../map/inMemoryMap.ts";
import { Choice, Notice } from "../../components/controls.tsx";
import { digits, Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { useAnswer, usePage } from "../../shell/hooks.ts";

export function AlignmentMap({ source, tokens }: { source: string; tokens: number[] }) {
  const { about } = usePage();
  const cross = about.attentions.find(({ kind }) => kind === "cross");
  const [layer, setLayer] = useState("mean");
  const [head, setHead] = useState("mean");
  const { answer, error } = useAnswer(
    "alignment",
    tokens.length === 0 ? null : { source, tokens, layer: chosen(layer), head: chosen(head) },
  );
  const shown = useMemo(
    () =>
      answer === null || answer.rows === 0
        ? null
        : {
            map: new WholeMap(answer.rows, answer.columns, bytes(answer.weights_u8)),
            rows: labelsOf(answer.written),
            columns: labelsOf(answer.source),
          },
    [answer],
  );
  const pointed = useMemo(() => new Held<Point>({ row: null, column: null }), []);
  const numbers = (count: number) => [
    ["mean", "mean"] as const,
    ...Array.from({ length: count }, (_, n) => [String(n), String(n)] as const),
  ];
  return (
    <section class="alignment" aria-label="Alignment">
      <div class="row">
        <h3>Where it looks in the source</h3>
        <Choice label="Layer" value={layer} onChange={setLayer} options={numbers(cross?.layers ?? 0)} />
        <Choice label="Head" value={head} onChange={setHead} options={numbers(cross?.heads ?? 0)} />
      </div>
      <Notice error={error} />
      {shown === null || tokens.length === 0 ? (
        <p class="quiet">Nothing is written yet.</p>
      ) : (
        <>
          <MapCanvas
            title="Alignment"
            data={shown.map}
            rows={shown.rows}
            columns={shown.columns}
            claim={false}
            pointed={pointed}
            tallest={440}
            onPoint={(point) => pointed.set(point ?? { row: null, column: null })}
            buttons={false}
          />
          <Legend high={digits(shown.map.top())} claim={false} />
        </>
      )}
    </section>
  );
}

function chosen(word: string): number | "mean" {
  return word === "mean" ? "mean" : Number(word);
}
