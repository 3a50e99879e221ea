/** A map of weights in tiles: an overview of low resolution, and tiles of full resolution once loaded. */

import type { BitMatrix } from "../wire.ts";

/** A rectangle in tokens; `bottom` and `right` are exclusive. */
export interface Region {
  top: number;
  left: number;
  bottom: number;
  right: number;
}

/** The weights of one rectangle of a map, as bytes. */
export interface Tile {
  row: number; // in tokens, as is column
  column: number;
  rows: number; // in cells, as are columns
  columns: number;
  cellSize: number; // tokens per cell, in both directions
  values: Uint8Array;
  maxWeight: number; // weight = maxWeight · (byte / 255)²
  colourGain: number; // byte · colourGain is an index into the colour ramp
  claim: BitMatrix | null; // cells that the claimed mask allows; null if unknown
}

export interface CellValue {
  weight: number;
  isAllowed: boolean | null;
  isExact: boolean; // false: the maximum over a cell of several tokens
}

export interface MapData {
  readonly rows: number;
  readonly columns: number;
  /** The largest weight: the end of the colour ramp. */
  maxWeight(): number;
  /** The overview; null until it is loaded. */
  overview(): Tile | null;
  /** The loaded tiles of a region; the missing ones are requested. */
  tiles(region: Region): Tile[];
  cellValue(row: number, column: number): CellValue | null;
  error(): string;
  /** Called whenever there is more to draw; returns a function that unsubscribes. */
  subscribe(listener: () => void): () => void;
}

/** The index into a tile's values of the cell that contains a position of the map. */
export function cellIndex(tile: Tile, row: number, column: number): number {
  const [cellRow, cellColumn] = cellPosition(tile, row, column);
  return cellRow * tile.columns + cellColumn;
}

export function cellWeight(tile: Tile, index: number): number {
  return tile.maxWeight * (tile.values[index] / 255) ** 2;
}

export function isCellAllowed(tile: Tile, row: number, column: number): boolean | null {
  if (tile.claim === null) return null;
  return tile.claim.at(...cellPosition(tile, row, column));
}

function cellPosition(tile: Tile, row: number, column: number): [row: number, column: number] {
  return [Math.floor((row - tile.row) / tile.cellSize), Math.floor((column - tile.column) / tile.cellSize)];
}
