/** Sequences packed into one row. */

/** All positive integers in a text, whatever separates them. */
export function parseLengths(text: string): number[] {
  return (text.match(/\d+/g) ?? []).map(Number).filter((n) => n > 0);
}

/** The positions where a packed sequence starts, except the first one. */
export function segmentBoundaries(packing: readonly number[], leftPadding: number, rows: number): number[] {
  const boundaries: number[] = [];
  let position = leftPadding;
  for (const length of packing) {
    if (position > leftPadding && position < rows) boundaries.push(position);
    position += length;
  }
  if (packing.length > 0 && position < rows) boundaries.push(position);
  return boundaries;
}
