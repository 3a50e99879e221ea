/** One line that says in words what the pointer is on. */

import { useHeld } from "../../store.ts";
import { label } from "../../graphemes.ts";
import type { TiledMap } from "../../map/tiledMap.ts";
import { digits } from "../../components/legend.tsx";
import type { Pointing } from "./hoverState.ts";
import type { Reading } from "./attentionData.ts";

interface Props {
  reading: Reading;
  pointing: Pointing;
  maps: TiledMap[];
}

export function Readout({ reading, pointing, maps }: Props) {
  const place = useHeld(pointing.place);
  const text = useHeld(pointing.sides.text),
    source = useHeld(pointing.sides.source);
  const light = { text: useHeld(pointing.lights.text), source: useHeld(pointing.lights.source) };
  return (
    <p class="readout" role="status">
      {words()}
    </p>
  );

  function words(): string {
    if (place !== null && place.point.row !== null && place.point.column !== null) return cell();
    const side = text !== null ? "text" : source !== null ? "source" : null;
    if (side === null) return "Point at a token or a cell, or go through the tokens with the arrow keys.";
    const token = (text ?? source)!;
    const most = (["text", "source"] as const).flatMap((name) => best(name, light[name].reads)).sort((a, b) => b[1] - a[1])[0];
    const here = `${quoted(side, token)} (${token})`;
    return most === undefined ? here : `${here} reads ${most[0]} most: ${digits(most[1])}.`;
  }

  function cell(): string {
    const { attended, point } = place!;
    const at = maps.find((map) => map.which.name === attended.name)?.at(point.row!, point.column!);
    const reader = `${quoted(attended.row_side, point.row!)} (${point.row})`;
    const who = `${reader} reads ${quoted(attended.column_side, point.column!)} (${point.column})`;
    if (!at) return who;
    const size = at.exact ? digits(at.weight) : `at most ${digits(at.weight)}, with its neighbours`;
    const may =
      at.allowed === null
        ? ""
        : at.allowed
          ? "; the mask allows it"
          : at.weight > 0
            ? "; the mask forbids it"
            : "; the mask forbids it, and it does not";
    return `${who}: ${size}${may}.`;
  }

  function best(side: "text" | "source", weights: Float32Array | null): [string, number][] {
    if (weights === null || weights.length === 0) return [];
    let n = 0;
    weights.forEach((weight, i) => {
      if (weight > weights[n]) n = i;
    });
    return [[`${quoted(side, n)} (${n})`, weights[n]]];
  }

  function quoted(side: "text" | "source", token: number): string {
    return `“${label(reading.tokens(side)[token]?.text ?? "")}”`;
  }
}
