/** The cross-attention of each generated token to the source. */

import { useMemo, useState } from "preact/hooks";
import { Select, Status } from "../../components/controls.tsx";
import { formatWeight, Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { InMemoryMap } from "../../map/inMemoryMap.ts";
import { tokenLabels } from "../../map/labels.ts";
import type { CellPosition } from "../../map/matrix.ts";
import { useExplorer, useQuery } from "../../shell/hooks.ts";
import { Store } from "../../store.ts";
import { decodeBytes } from "../../wire.ts";

export function AlignmentMap({ source, tokens }: { source: string; tokens: number[] }) {
  const { modelInfo } = useExplorer();
  const cross = modelInfo.attentions.find(({ kind }) => kind === "cross");
  const [layer, setLayer] = useState("mean");
  const [head, setHead] = useState("mean");
  const { answer, error } = useQuery(
    "alignment",
    tokens.length === 0
      ? null
      : { source, tokens, layer: parseIndexOrMean(layer), head: parseIndexOrMean(head) },
  );
  const map = useMemo(
    () =>
      answer === null || answer.rows === 0
        ? null
        : {
            map: new InMemoryMap(answer.rows, answer.columns, decodeBytes(answer.weights_u8)),
            rows: tokenLabels(answer.target),
            columns: tokenLabels(answer.source),
          },
    [answer],
  );
  const hovered = useMemo(() => new Store<CellPosition>({ row: null, column: null }), []);
  const indexOptions = (count: number) => [
    ["mean", "mean"] as const,
    ...Array.from({ length: count }, (_, n) => [String(n), String(n)] as const),
  ];
  return (
    <section class="alignment" aria-label="Alignment">
      <div class="row">
        <h3>Alignment with the source</h3>
        <Select label="Layer" value={layer} onChange={setLayer} options={indexOptions(cross?.layers ?? 0)} />
        <Select label="Head" value={head} onChange={setHead} options={indexOptions(cross?.heads ?? 0)} />
      </div>
      <Status error={error} />
      {map === null || tokens.length === 0 ? (
        <p class="muted">No tokens generated yet.</p>
      ) : (
        <>
          <MapCanvas
            title="Alignment"
            data={map.map}
            rows={map.rows}
            columns={map.columns}
            showClaim={false}
            hovered={hovered}
            maxHeight={440}
            onHover={(point) => hovered.set(point ?? { row: null, column: null })}
            showZoomButtons={false}
          />
          <Legend high={formatWeight(map.map.maxWeight())} showClaim={false} />
        </>
      )}
    </section>
  );
}

function parseIndexOrMean(value: string): number | "mean" {
  return value === "mean" ? "mean" : Number(value);
}
