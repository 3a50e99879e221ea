/** Which tiles cover what: the arithmetic of large maps. */

import type { Region } from "./tile.ts";

export const TILE = 256; // tokens on the side of a tile
export const OVERVIEW = 512; // cells on the side of the coarse picture of it all

export interface Corner {
  row: number;
  column: number;
}

/** Tiles that meet a region, those in its middle first: they are looked at. */
export function tiles(region: Region, rows: number, columns: number, size: number = TILE): Corner[] {
  const top = down(Math.max(0, region.top), size),
    left = down(Math.max(0, region.left), size);
  const bottom = Math.min(rows, region.bottom),
    right = Math.min(columns, region.right);
  const out: Corner[] = [];
  for (let row = top; row < bottom; row += size) {
    for (let column = left; column < right; column += size) out.push({ row, column });
  }
  const middle = { row: (region.top + region.bottom - size) / 2, column: (region.left + region.right - size) / 2 };
  const far = (corner: Corner) => Math.hypot(corner.row - middle.row, corner.column - middle.column);
  return out.sort((a, b) => far(a) - far(b));
}

/** The corner of the tile that a token is in. */
export function corner(row: number, column: number, size: number = TILE): Corner {
  return { row: down(row, size), column: down(column, size) };
}

/** Does one tile hold all of it? */
export function single(rows: number, columns: number): boolean {
  return rows <= TILE && columns <= TILE;
}

/** Are tokens so large on the screen that a coarse picture would show its cells? */
export function wantsTiles(scale: number, ratio: number, rows: number, columns: number): boolean {
  return single(rows, columns) || scale * ratio >= 1;
}

function down(value: number, size: number): number {
  return Math.floor(value / size) * size;
}
