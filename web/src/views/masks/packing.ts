/** Several texts in one row. */

/** Their lengths, from what was typed: whole numbers, whatever stands between them. */
export function lengths(typed: string): number[] {
  return (typed.match(/\d+/g) ?? []).map(Number).filter((n) => n > 0);
}

/** The positions at which a text begins that is not the first. */
export function cuts(packing: readonly number[], left: number, rows: number): number[] {
  const out: number[] = [];
  let at = left;
  for (const length of packing) {
    if (at > left && at < rows) out.push(at);
    at += length;
  }
  if (packing.length > 0 && at < rows) out.push(at);
  return out;
}
