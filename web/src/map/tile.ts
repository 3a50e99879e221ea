/** A map of weights, as the painters see it: pieces of bytes, coarse or fine, that come when they come. */

import type { Bits } from "../wire.ts";

/** A rectangle in tokens; `bottom` and `right` are not in it any more. */
export interface Region {
  top: number;
  left: number;
  bottom: number;
  right: number;
}

/** Bytes of one rectangle. */
export interface Piece {
  row: number; // its first token
  column: number;
  rows: number; // in cells
  columns: number;
  step: number; // tokens in a cell, each way
  values: Uint8Array;
  full: number; // the weight that 255 stands for: weight = full · (byte / 255)²
  gain: number; // byte · gain is a place on the ramp of 256 colours
  claim: Bits | null; // cells that may be read; null where that is not known
}

export interface Reading {
  weight: number;
  allowed: boolean | null;
  exact: boolean; // false: the largest of several tokens
}

export interface MapData {
  readonly rows: number;
  readonly columns: number;
  /** The largest weight: where the ramp ends. */
  top(): number;
  /** All of it in one coarse piece, as soon as that is there. */
  coarse(): Piece | null;
  /** The fine pieces of a region that are there; the others are asked for. */
  fine(region: Region): Piece[];
  at(row: number, column: number): Reading | null;
  error(): string;
  /** Told whenever there is more to draw; gives back what stops that. */
  listen(changed: () => void): () => void;
}

/** The place in a piece's bytes of the cell that holds a token of the map. */
export function cell(piece: Piece, row: number, column: number): number {
  return Math.floor((row - piece.row) / piece.step) * piece.columns + Math.floor((column - piece.column) / piece.step);
}

export function weighed(piece: Piece, n: number): number {
  return piece.full * (piece.values[n] / 255) ** 2;
}

export function allowed(piece: Piece, row: number, column: number): boolean | null {
  if (piece.claim === null) return null;
  return piece.claim.at(Math.floor((row - piece.row) / piece.step), Math.floor((column - piece.column) / piece.step));
}
