/** Tiles rendered to images once, so that drawing a frame only scales them. */

import type { Tile } from "./tile.ts";

/** The colours and the font of a theme, for canvases. */
export interface Palette {
  ramp: Uint8ClampedArray;
  ink: string;
  soft: string;
  line: string;
  paper: string;
  accent: string;
  alert: string;
  font: string; // family without a size
}

/** A tile as images with one pixel per cell. */
export interface TileImages {
  weights: HTMLCanvasElement;
  forbidden: HTMLCanvasElement | null;
  outside: OutsideCell[]; // weights outside the claim, the largest first
}

export interface OutsideCell {
  row: number;
  column: number;
  byte: number;
}

const MAX_OUTSIDE_CELLS = 60; // marked per tile; more would hide the map
const MIN_OUTSIDE_BYTE = 2; // smaller weights, below 6e-5, are rounding errors

let cache = new WeakMap<Tile, TileImages>();
let cachedRamp: Uint8ClampedArray | null = null;

export function tileImages(tile: Tile, palette: Palette): TileImages {
  if (cachedRamp !== palette.ramp) {
    cache = new WeakMap();
    cachedRamp = palette.ramp;
  }
  let images = cache.get(tile);
  if (images === undefined) {
    const forbidden = renderForbidden(tile);
    images = {
      weights: renderWeights(tile, palette.ramp),
      forbidden,
      outside: forbidden === null ? [] : findOutsideCells(tile),
    };
    cache.set(tile, images);
  }
  return images;
}

export function createCanvas(width: number, height: number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, width);
  canvas.height = Math.max(1, height);
  return canvas;
}

function renderWeights(tile: Tile, ramp: Uint8ClampedArray): HTMLCanvasElement {
  return renderPixels(tile, (values, pixels) => {
    for (let n = 0; n < values.length; n++) {
      const colour = Math.min(255, Math.round(values[n] * tile.colourGain)) * 3;
      pixels[n * 4] = ramp[colour];
      pixels[n * 4 + 1] = ramp[colour + 1];
      pixels[n * 4 + 2] = ramp[colour + 2];
      pixels[n * 4 + 3] = 255;
    }
  });
}

function renderForbidden(tile: Tile): HTMLCanvasElement | null {
  const { claim } = tile;
  if (claim === null) return null;
  let any = false;
  const canvas = renderPixels(tile, (_, pixels) => {
    for (let row = 0, n = 3; row < tile.rows; row++) {
      for (let column = 0; column < tile.columns; column++, n += 4) {
        if (claim.at(row, column)) continue;
        pixels[n] = 255;
        any = true;
      }
    }
  });
  return any ? canvas : null;
}

function findOutsideCells(tile: Tile): OutsideCell[] {
  const cells: OutsideCell[] = [];
  const minByte = Math.max(MIN_OUTSIDE_BYTE, 0.1 * tile.values.reduce((a, b) => Math.max(a, b), 0));
  for (let row = 0, n = 0; row < tile.rows; row++) {
    for (let column = 0; column < tile.columns; column++, n++) {
      if (tile.values[n] >= minByte && !tile.claim!.at(row, column)) {
        cells.push({
          row: tile.row + row * tile.cellSize,
          column: tile.column + column * tile.cellSize,
          byte: tile.values[n],
        });
      }
    }
  }
  return cells.sort((a, b) => b.byte - a.byte).slice(0, MAX_OUTSIDE_CELLS);
}

function renderPixels(
  tile: Tile,
  fill: (values: Uint8Array, pixels: Uint8ClampedArray) => void,
): HTMLCanvasElement {
  const canvas = createCanvas(tile.columns, tile.rows);
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(canvas.width, canvas.height);
  fill(tile.values, image.data);
  context.putImageData(image, 0, 0);
  return canvas;
}
