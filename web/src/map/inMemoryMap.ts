/** A small map that is there at once. */

import { type Bits, weight } from "../wire.ts";
import { allowed, cell, type MapData, type Piece, type Reading, weighed } from "./tile.ts";

export class WholeMap implements MapData {
  private readonly piece: Piece;
  private readonly most: number;

  /** Bytes are √-scaled weights; `top` is where the ramp ends, the largest of them unless said. */
  constructor(
    readonly rows: number,
    readonly columns: number,
    values: Uint8Array,
    claim: Bits | null = null,
    top?: number,
  ) {
    this.most = top ?? weight(values.reduce((a, b) => Math.max(a, b), 0));
    this.piece = { row: 0, column: 0, rows, columns, step: 1, values, full: 1, gain: gain(this.most), claim };
  }

  /** A table of yes and no. */
  static of(bits: Bits): WholeMap {
    const values = new Uint8Array(bits.rows * bits.columns);
    for (let row = 0; row < bits.rows; row++) {
      for (let column = 0; column < bits.columns; column++)
        values[row * bits.columns + column] = bits.at(row, column) ? 160 : 0;
    }
    return new WholeMap(bits.rows, bits.columns, values, bits, 1);
  }

  top(): number {
    return this.most;
  }

  coarse(): Piece | null {
    return null;
  }

  fine(): Piece[] {
    return [this.piece];
  }

  at(row: number, column: number): Reading | null {
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns) return null;
    return {
      weight: weighed(this.piece, cell(this.piece, row, column)),
      allowed: allowed(this.piece, row, column),
      exact: true,
    };
  }

  error(): string {
    return "";
  }

  listen(): () => void {
    return () => undefined;
  }
}

/** What a √-scaled byte is multiplied by so that the largest weight gets the last colour. */
export function gain(top: number): number {
  return top > 0 ? 1 / Math.sqrt(top) : 1;
}
