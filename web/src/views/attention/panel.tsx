/** One attention: its map, its claimed mask, and errors. */

import { useEffect, useState } from "preact/hooks";
import type { AttentionInfo, Head } from "../../api.ts";
import { Status } from "../../components/controls.tsx";
import { formatWeight, Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import type { AxisLabels } from "../../map/labels.ts";
import type { MapMode } from "../../map/mapViewer.ts";
import type { TiledMap } from "../../map/tiledMap.ts";
import type { HoverState } from "./hoverState.ts";

export const ATTENTION_TITLES: Record<AttentionInfo["kind"], string> = {
  self: "Self-attention",
  masked: "Masked self-attention",
  cross: "Cross-attention",
};

export function attentionTitle(attention: AttentionInfo): string {
  const isEncoder = attention.name.startsWith("encoder") && attention.kind === "self";
  return isEncoder ? "Encoder self-attention" : ATTENTION_TITLES[attention.kind];
}

interface Props {
  attention: AttentionInfo;
  map: TiledMap;
  head: Head;
  rows: AxisLabels;
  columns: AxisLabels;
  hover: HoverState;
  mode: MapMode;
  showClaim: boolean;
  minWeight: number;
  isOnly: boolean;
  isSelected: boolean;
  onSelect(): void;
}

export function AttentionPanel({
  attention,
  map,
  head,
  rows,
  columns,
  hover,
  mode,
  showClaim,
  minWeight,
  isOnly,
  isSelected,
  onSelect,
}: Props) {
  const [maxWeight, setMaxWeight] = useState(0);
  const [error, setError] = useState("");
  useEffect(() => {
    const update = () => {
      setMaxWeight(map.maxWeight());
      setError(map.error());
    };
    update();
    return map.subscribe(update);
  }, [map]);
  const title = attentionTitle(attention),
    layer = map.id.layer;
  return (
    <section class={isSelected && !isOnly ? "panel selected" : "panel"} aria-label={title}>
      <h3>
        {isOnly ? (
          title
        ) : (
          <button type="button" class="name" aria-pressed={isSelected} onClick={onSelect}>
            {title}
          </button>
        )}{" "}
        <span class="muted">
          layer {layer}, {headTitle(map.id.head)}
          {map.id.head === head ? "" : " (rollout needs self-attention)"}
        </span>
      </h3>
      <p class="muted mask">
        claimed mask <code>{attention.mask[layer] ?? attention.mask[0] ?? "full"}</code>
      </p>
      <Status error={error} isLoading={maxWeight === 0 && error === ""}>
        Loading …
      </Status>
      <MapCanvas
        title={`${title}, layer ${layer}, ${headTitle(map.id.head)}`}
        data={map}
        rows={rows}
        columns={columns}
        hovered={hover.cell(attention.name)}
        onHover={(point) => hover.hoverMap(attention, point)}
        mode={mode}
        showClaim={showClaim}
        minWeight={minWeight}
        isCross={attention.kind === "cross"}
        forwardFraction={attention.kind === "masked" ? 0.18 : 0.5}
        maxHeight={isOnly ? 760 : 460}
      />
      <Legend high={formatWeight(maxWeight)} showClaim={showClaim} isArcs={mode === "arcs"} />
    </section>
  );
}

export function headTitle(head: Head): string {
  return head === "mean" ? "mean of heads" : head === "rollout" ? "rollout" : `head ${head}`;
}
