/** The tile grid of large maps. */

import type { Region } from "./tile.ts";

export const TILE_SIZE = 256; // tokens along each side
export const OVERVIEW_SIZE = 512; // cells along each side, at most

export interface TileOrigin {
  row: number;
  column: number;
}

/** The tiles that overlap a region, those nearest to its centre first. */
export function tileOrigins(
  region: Region,
  rows: number,
  columns: number,
  size: number = TILE_SIZE,
): TileOrigin[] {
  const top = floorToMultiple(Math.max(0, region.top), size),
    left = floorToMultiple(Math.max(0, region.left), size);
  const bottom = Math.min(rows, region.bottom),
    right = Math.min(columns, region.right);
  const origins: TileOrigin[] = [];
  for (let row = top; row < bottom; row += size) {
    for (let column = left; column < right; column += size) origins.push({ row, column });
  }
  const centre = {
    row: (region.top + region.bottom - size) / 2,
    column: (region.left + region.right - size) / 2,
  };
  const distance = (origin: TileOrigin) => Math.hypot(origin.row - centre.row, origin.column - centre.column);
  return origins.sort((a, b) => distance(a) - distance(b));
}

/** The origin of the tile that contains a cell. */
export function tileOrigin(row: number, column: number, size: number = TILE_SIZE): TileOrigin {
  return { row: floorToMultiple(row, size), column: floorToMultiple(column, size) };
}

export function fitsOneTile(rows: number, columns: number): boolean {
  return rows <= TILE_SIZE && columns <= TILE_SIZE;
}

/** True if the scale is so large that the overview's resolution would be visible. */
export function needsTiles(scale: number, pixelRatio: number, rows: number, columns: number): boolean {
  return fitsOneTile(rows, columns) || scale * pixelRatio >= 1;
}

function floorToMultiple(value: number, size: number): number {
  return Math.floor(value / size) * size;
}
