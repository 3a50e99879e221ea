/** A small map that is in memory completely. */

import { type BitMatrix, weightFromByte } from "../wire.ts";
import { cellIndex, type CellValue, cellWeight, isCellAllowed, type MapData, type Tile } from "./tile.ts";

export class InMemoryMap implements MapData {
  private readonly tile: Tile;
  private readonly largestWeight: number;

  /** `values` are √-scaled weights. `maxWeight`, the end of the colour ramp, is by default the largest. */
  constructor(
    readonly rows: number,
    readonly columns: number,
    values: Uint8Array,
    claim: BitMatrix | null = null,
    maxWeight?: number,
  ) {
    this.largestWeight = maxWeight ?? weightFromByte(values.reduce((a, b) => Math.max(a, b), 0));
    this.tile = {
      row: 0,
      column: 0,
      rows,
      columns,
      cellSize: 1,
      values,
      maxWeight: 1,
      colourGain: colourGain(this.largestWeight),
      claim,
    };
  }

  /** A map of a boolean matrix, which is also its claim. */
  static fromBits(bits: BitMatrix): InMemoryMap {
    const values = new Uint8Array(bits.rows * bits.columns);
    for (let row = 0; row < bits.rows; row++) {
      for (let column = 0; column < bits.columns; column++)
        values[row * bits.columns + column] = bits.at(row, column) ? 160 : 0;
    }
    return new InMemoryMap(bits.rows, bits.columns, values, bits, 1);
  }

  maxWeight(): number {
    return this.largestWeight;
  }

  overview(): Tile | null {
    return null;
  }

  tiles(): Tile[] {
    return [this.tile];
  }

  cellValue(row: number, column: number): CellValue | null {
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns) return null;
    return {
      weight: cellWeight(this.tile, cellIndex(this.tile, row, column)),
      isAllowed: isCellAllowed(this.tile, row, column),
      isExact: true,
    };
  }

  error(): string {
    return "";
  }

  subscribe(): () => void {
    return () => undefined;
  }
}

/** The factor for √-scaled bytes by which the largest weight gets the last colour. */
export function colourGain(maxWeight: number): number {
  return maxWeight > 0 ? 1 / Math.sqrt(maxWeight) : 1;
}
