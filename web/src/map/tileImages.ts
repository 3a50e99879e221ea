/** Pieces turned into small pictures once, so that drawing a frame is a matter of scaling them. */

import type { Piece } from "./tile.ts";

/** What a theme draws with. */
export interface Palette {
  ramp: Uint8ClampedArray;
  ink: string;
  soft: string;
  line: string;
  paper: string;
  accent: string;
  alert: string;
  font: string; // the faces, without a size
}

/** A piece as a picture with one pixel for each cell. */
export interface Pictures {
  weights: HTMLCanvasElement;
  forbidden: HTMLCanvasElement | null;
  strays: Stray[]; // weights where none may be, the largest first
}

export interface Stray {
  row: number;
  column: number;
  byte: number;
}

const MANY = 60; // strays of a piece that are marked; a map full of them is seen without marks
const NOISE = 2; // bytes: a weight below 6e-5 is rounding

let cache = new WeakMap<Piece, Pictures>();
let inked: Uint8ClampedArray | null = null;

export function pictures(piece: Piece, palette: Palette): Pictures {
  if (inked !== palette.ramp) {
    cache = new WeakMap();
    inked = palette.ramp;
  }
  let made = cache.get(piece);
  if (made === undefined) {
    const forbidden = forbiddenOf(piece);
    made = { weights: weightsOf(piece, palette.ramp), forbidden, strays: forbidden === null ? [] : straysOf(piece) };
    cache.set(piece, made);
  }
  return made;
}

export function canvasOf(width: number, height: number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, width);
  canvas.height = Math.max(1, height);
  return canvas;
}

function weightsOf(piece: Piece, ramp: Uint8ClampedArray): HTMLCanvasElement {
  return filled(piece, (values, pixels) => {
    for (let n = 0; n < values.length; n++) {
      const colour = Math.min(255, Math.round(values[n] * piece.gain)) * 3;
      pixels[n * 4] = ramp[colour];
      pixels[n * 4 + 1] = ramp[colour + 1];
      pixels[n * 4 + 2] = ramp[colour + 2];
      pixels[n * 4 + 3] = 255;
    }
  });
}

function forbiddenOf(piece: Piece): HTMLCanvasElement | null {
  const { claim } = piece;
  if (claim === null) return null;
  let any = false;
  const canvas = filled(piece, (_, pixels) => {
    for (let row = 0, n = 3; row < piece.rows; row++) {
      for (let column = 0; column < piece.columns; column++, n += 4) {
        if (claim.at(row, column)) continue;
        pixels[n] = 255;
        any = true;
      }
    }
  });
  return any ? canvas : null;
}

function straysOf(piece: Piece): Stray[] {
  const out: Stray[] = [];
  const least = Math.max(NOISE, 0.1 * piece.values.reduce((a, b) => Math.max(a, b), 0));
  for (let row = 0, n = 0; row < piece.rows; row++) {
    for (let column = 0; column < piece.columns; column++, n++) {
      if (piece.values[n] >= least && !piece.claim!.at(row, column)) {
        out.push({ row: piece.row + row * piece.step, column: piece.column + column * piece.step, byte: piece.values[n] });
      }
    }
  }
  return out.sort((a, b) => b.byte - a.byte).slice(0, MANY);
}

function filled(piece: Piece, fill: (values: Uint8Array, pixels: Uint8ClampedArray) => void): HTMLCanvasElement {
  const canvas = canvasOf(piece.columns, piece.rows);
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(canvas.width, canvas.height);
  fill(piece.values, image.data);
  context.putImageData(image, 0, 0);
  return canvas;
}
