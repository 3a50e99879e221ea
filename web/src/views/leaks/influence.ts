/** Who moved whom in an audit: sizes from 1e-12 to 1, on a scale on which the smallest that counts can be seen. */

import { Bits, floats } from "../../wire.ts";
import type { Leaks } from "../../api.ts";
import { WholeMap } from "../../map/inMemoryMap.ts";

const LEAST = 1e-6; // relative to the largest: less is rounding

export interface Maps {
  claimed: WholeMap;
  measured: WholeMap;
  low: string;
  high: string;
}

export function mapsOf(answer: Leaks): Maps | null {
  const { rows, columns, claim_bits, influence_f32 } = answer;
  if (!rows || !columns || claim_bits === undefined || influence_f32 === undefined) return null;
  const claim = Bits.read(claim_bits, rows, columns);
  const sizes = floats(influence_f32);
  const most = sizes.reduce((a, b) => (Number.isFinite(b) ? Math.max(a, b) : a), 0);
  return {
    claimed: WholeMap.of(claim),
    measured: new WholeMap(
      rows,
      columns,
      Uint8Array.from(sizes, (size) => level(size, most)),
      claim,
      1,
    ),
    low: most > 0 ? `${(most * LEAST).toExponential(0)} or less` : "0",
    high: most.toPrecision(2),
  };
}

/** By its order of magnitude, 0 to 255. */
export function level(size: number, most: number): number {
  if (!(size > most * LEAST) || most <= 0) return 0;
  if (!Number.isFinite(size)) return 255;
  return Math.max(3, Math.round(255 * (1 - Math.log(size / most) / Math.log(LEAST))));
}
