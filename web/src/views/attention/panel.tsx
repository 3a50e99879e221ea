/** One attention: its map, and what is wrong with it if something is. */

import { useEffect, useState } from "preact/hooks";
import type { Attended, Head } from "../../api.ts";
import type { Labels } from "../../map/labels.ts";
import type { TiledMap } from "../../map/tiledMap.ts";
import type { Mode } from "../../map/mapViewer.ts";
import { Notice } from "../../components/controls.tsx";
import { Legend, digits } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import type { Pointing } from "./hoverState.ts";

export const TITLES: Record<Attended["kind"], string> = {
  self: "Self-attention",
  masked: "Masked self-attention",
  cross: "Cross-attention",
};

export function titleOf(attended: Attended): string {
  return attended.name.startsWith("encoder") && attended.kind === "self" ? "Encoder self-attention" : TITLES[attended.kind];
}

interface Props {
  attended: Attended;
  map: TiledMap;
  head: Head;
  rows: Labels;
  columns: Labels;
  pointing: Pointing;
  mode: Mode;
  claim: boolean;
  least: number;
  alone: boolean;
  chosen: boolean;
  onChoose(): void;
}

export function Panel({ attended, map, head, rows, columns, pointing, mode, claim, least, alone, chosen, onChoose }: Props) {
  const [top, setTop] = useState(0);
  const [error, setError] = useState("");
  useEffect(() => {
    const look = () => {
      setTop(map.top());
      setError(map.error());
    };
    look();
    return map.listen(look);
  }, [map]);
  const title = titleOf(attended),
    layer = map.which.layer;
  return (
    <section class={chosen && !alone ? "panel chosen" : "panel"} aria-label={title}>
      <h3>
        {alone ? (
          title
        ) : (
          <button type="button" class="name" aria-pressed={chosen} onClick={onChoose}>
            {title}
          </button>
        )}{" "}
        <span class="quiet">
          layer {layer}, {named(map.which.head)}
          {map.which.head === head ? "" : " (rollout is for self-attention)"}
        </span>
      </h3>
      <p class="quiet mask">
        claims <code>{attended.mask[layer] ?? attended.mask[0] ?? "full"}</code>
      </p>
      <Notice error={error} busy={top === 0 && error === ""}>
        Reading …
      </Notice>
      <MapCanvas
        title={`${title}, layer ${layer}, ${named(map.which.head)}`}
        data={map}
        rows={rows}
        columns={columns}
        pointed={pointing.point(attended.name)}
        onPoint={(point) => pointing.inMap(attended, point)}
        mode={mode}
        claim={claim}
        least={least}
        pair={attended.kind === "cross"}
        forward={attended.kind === "masked" ? 0.18 : 0.5}
        tallest={alone ? 760 : 460}
      />
      <Legend high={digits(top)} claim={claim} arcs={mode === "arcs"} />
    </section>
  );
}

export function named(head: Head): string {
  return head === "mean" ? "mean of heads" : head === "rollout" ? "rollout" : `head ${head}`;
}
