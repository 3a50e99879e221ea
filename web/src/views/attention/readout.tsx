/** Describes the hovered token or cell in a line of text. */

import { formatWeight } from "../../components/legend.tsx";
import { displayLabel } from "../../graphemes.ts";
import type { TiledMap } from "../../map/tiledMap.ts";
import { useStore } from "../../store.ts";
import type { AttentionData } from "./attentionData.ts";
import type { HoverState } from "./hoverState.ts";

interface Props {
  data: AttentionData;
  hover: HoverState;
  maps: TiledMap[];
}

export function Readout({ data, hover, maps }: Props) {
  const hoveredCell = useStore(hover.hoveredCell);
  const text = useStore(hover.hoveredTokens.text),
    source = useStore(hover.hoveredTokens.source);
  const highlights = { text: useStore(hover.highlights.text), source: useStore(hover.highlights.source) };
  return (
    <p class="readout" role="status">
      {message()}
    </p>
  );

  function message(): string {
    const { row = null, column = null } = hoveredCell?.position ?? {};
    if (row !== null && column !== null) return cellMessage();
    const side = text !== null ? "text" : source !== null ? "source" : null;
    if (side === null) return "Hover over a token or a cell, or move through the tokens with the arrow keys.";
    const token = (text ?? source)!;
    const strongest = (["text", "source"] as const)
      .flatMap((name) => strongestToken(name, highlights[name].attendsTo))
      .sort((a, b) => b[1] - a[1])[0];
    const hoveredToken = `${quoteToken(side, token)} (${token})`;
    if (strongest === undefined) return hoveredToken;
    return `${hoveredToken} attends most to ${strongest[0]}: ${formatWeight(strongest[1])}.`;
  }

  function cellMessage(): string {
    const { attention, position } = hoveredCell!;
    const map = maps.find(({ id }) => id.name === attention.name);
    const value = map?.cellValue(position.row!, position.column!);
    const query = `${quoteToken(attention.row_side, position.row!)} (${position.row})`;
    const key = `${quoteToken(attention.column_side, position.column!)} (${position.column})`;
    const pair = `${query} attends to ${key}`;
    if (!value) return pair;
    const formatted = formatWeight(value.weight);
    const weight = value.isExact ? formatted : `at most ${formatted}, with its neighbours`;
    const permission =
      value.isAllowed === null
        ? ""
        : value.isAllowed
          ? "; allowed by the mask"
          : value.weight > 0
            ? "; forbidden by the mask"
            : "; masked out";
    return `${pair}: ${weight}${permission}.`;
  }

  function strongestToken(side: "text" | "source", weights: Float32Array | null): [string, number][] {
    if (weights === null || weights.length === 0) return [];
    let n = 0;
    weights.forEach((weight, i) => {
      if (weight > weights[n]) n = i;
    });
    return [[`${quoteToken(side, n)} (${n})`, weights[n]]];
  }

  function quoteToken(side: "text" | "source", token: number): string {
    return `“${displayLabel(data.tokens(side)[token]?.text ?? "")}”`;
  }
}
