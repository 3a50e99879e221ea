/** Maps of an audit's influences, from 1e-12 to 1, on a logarithmic scale. */

import type { AuditAnswer } from "../../api.ts";
import { InMemoryMap } from "../../map/inMemoryMap.ts";
import { BitMatrix, decodeFloats } from "../../wire.ts";

const MIN_RELATIVE_INFLUENCE = 1e-6; // to the largest; smaller ones are rounding errors

export interface InfluenceMaps {
  claimed: InMemoryMap;
  measured: InMemoryMap;
  low: string;
  high: string;
}

export function influenceMaps(answer: AuditAnswer): InfluenceMaps | null {
  const { rows, columns, claim_bits, influence_f32 } = answer;
  if (!rows || !columns || claim_bits === undefined || influence_f32 === undefined) return null;
  const claim = BitMatrix.decode(claim_bits, rows, columns);
  const influences = decodeFloats(influence_f32);
  const max = influences.reduce((a, b) => (Number.isFinite(b) ? Math.max(a, b) : a), 0);
  return {
    claimed: InMemoryMap.fromBits(claim),
    measured: new InMemoryMap(
      rows,
      columns,
      Uint8Array.from(influences, (influence) => influenceLevel(influence, max)),
      claim,
      1,
    ),
    low: max > 0 ? `${(max * MIN_RELATIVE_INFLUENCE).toExponential(0)} or less` : "0",
    high: max.toPrecision(2),
  };
}

/** An influence as a byte, on a logarithmic scale. */
export function influenceLevel(influence: number, max: number): number {
  if (!(influence > max * MIN_RELATIVE_INFLUENCE) || max <= 0) return 0;
  if (!Number.isFinite(influence)) return 255;
  return Math.max(3, Math.round(255 * (1 - Math.log(influence / max) / Math.log(MIN_RELATIVE_INFLUENCE))));
}
