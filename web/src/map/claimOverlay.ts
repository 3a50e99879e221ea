/** Draws the claimed mask over the weights: hatching on forbidden cells, crosses on weights in them. */

import type { Camera, Viewport } from "./camera.ts";
import type { Tile } from "./tile.ts";
import { createCanvas, type Palette, tileImages } from "./tileImages.ts";

export interface PlotLayout {
  camera: Camera;
  viewport: Viewport;
  left: number; // pixels for the row labels
  top: number; // pixels for the column labels
  pixelRatio: number; // device pixels per CSS pixel
  palette: Palette;
}

/** Draws a tile's image, snapped to device pixels: otherwise there would be seams between tiles. */
export function drawTileImage(
  context: CanvasRenderingContext2D,
  plot: PlotLayout,
  tile: Tile,
  image: HTMLCanvasElement,
): void {
  const { camera, pixelRatio } = plot;
  const snap = (value: number) => Math.round(value * pixelRatio) / pixelRatio;
  const x = snap((tile.column - camera.x) * camera.scale),
    y = snap((tile.row - camera.y) * camera.scale);
  const right = snap((tile.column + tile.columns * tile.cellSize - camera.x) * camera.scale);
  const bottom = snap((tile.row + tile.rows * tile.cellSize - camera.y) * camera.scale);
  context.drawImage(image, x, y, right - x, bottom - y);
}

let hatchCanvas: HTMLCanvasElement | null = null;
let outlineCanvas: HTMLCanvasElement | null = null;

/** Hatches the cells that the claim forbids, and outlines them. */
export function drawClaim(context: CanvasRenderingContext2D, plot: PlotLayout, tiles: Tile[]): void {
  const { viewport, pixelRatio, palette } = plot;
  const width = Math.ceil(viewport.width * pixelRatio),
    height = Math.ceil(viewport.height * pixelRatio);
  hatchCanvas = clearedCanvas(hatchCanvas, width, height);
  outlineCanvas = clearedCanvas(outlineCanvas, width, height);
  const hatchContext = hatchCanvas.getContext("2d")!,
    outlineContext = outlineCanvas.getContext("2d")!;
  hatchContext.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  hatchContext.imageSmoothingEnabled = false;
  let hasForbidden = false;
  for (const tile of tiles) {
    const { forbidden } = tileImages(tile, palette);
    if (tile !== tiles[0]) clearTile(hatchContext, plot, tile);
    if (forbidden === null) continue;
    drawTileImage(hatchContext, plot, tile, forbidden);
    hasForbidden = true;
  }
  if (!hasForbidden) return;
  hatchContext.setTransform(1, 0, 0, 1, 0, 0);
  drawOutline(outlineContext, hatchCanvas, palette.soft, Math.max(1, Math.round(pixelRatio)));
  hatchContext.globalCompositeOperation = "source-in";
  hatchContext.fillStyle = hatchPattern(hatchContext, palette, pixelRatio);
  hatchContext.fillRect(0, 0, width, height);
  hatchContext.globalCompositeOperation = "source-over";
  context.save();
  context.setTransform(1, 0, 0, 1, Math.round(plot.left * pixelRatio), Math.round(plot.top * pixelRatio));
  context.drawImage(hatchCanvas, 0, 0);
  context.drawImage(outlineCanvas, 0, 0);
  context.restore();
}

/** Clears the area of a tile, which replaces the overview below it. */
function clearTile(context: CanvasRenderingContext2D, { camera }: PlotLayout, tile: Tile): void {
  context.clearRect(
    (tile.column - camera.x) * camera.scale,
    (tile.row - camera.y) * camera.scale,
    tile.columns * tile.cellSize * camera.scale,
    tile.rows * tile.cellSize * camera.scale,
  );
}

/** An empty canvas of at least this size; the given one is reused if it is large enough. */
function clearedCanvas(canvas: HTMLCanvasElement | null, width: number, height: number): HTMLCanvasElement {
  if (canvas === null || canvas.width < width || canvas.height < height) {
    return createCanvas(Math.max(width, canvas?.width ?? 0), Math.max(height, canvas?.height ?? 0));
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

/** Draws the outline of a shape: the shape shifted in four directions, minus the shape itself. */
function drawOutline(
  context: CanvasRenderingContext2D,
  shape: HTMLCanvasElement,
  colour: string,
  thickness: number,
): void {
  context.globalCompositeOperation = "source-over";
  for (const [dx, dy] of [
    [thickness, 0],
    [-thickness, 0],
    [0, thickness],
    [0, -thickness],
  ])
    context.drawImage(shape, dx, dy);
  context.globalCompositeOperation = "destination-out";
  context.drawImage(shape, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = colour;
  context.fillRect(0, 0, shape.width, shape.height);
  context.globalCompositeOperation = "source-over";
}

function hatchPattern(
  context: CanvasRenderingContext2D,
  palette: Palette,
  pixelRatio: number,
): CanvasPattern {
  const size = Math.round(7 * pixelRatio);
  const patternCanvas = createCanvas(size, size);
  const pattern = patternCanvas.getContext("2d")!;
  pattern.strokeStyle = palette.soft;
  pattern.globalAlpha = 0.5;
  pattern.lineWidth = Math.max(1, pixelRatio * 0.8);
  pattern.beginPath();
  for (const shift of [-size, 0, size]) {
    pattern.moveTo(shift - 1, size + 1);
    pattern.lineTo(shift + size + 1, -1);
  }
  pattern.stroke();
  return context.createPattern(patternCanvas, "repeat")!;
}

/** Marks weights outside the claim with crosses, which are visible at any scale. */
export function drawOutsideCells(context: CanvasRenderingContext2D, plot: PlotLayout, tiles: Tile[]): void {
  const { camera, palette } = plot;
  const fineTiles = tiles.length > 1 ? tiles.slice(1) : tiles;
  context.strokeStyle = palette.alert;
  context.fillStyle = palette.paper;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const tile of fineTiles) {
    for (const { row, column } of tileImages(tile, palette).outside) {
      const size = Math.max(8, Math.min(14, tile.cellSize * camera.scale * 0.7));
      const x = (column + tile.cellSize / 2 - camera.x) * camera.scale - size / 2;
      const y = (row + tile.cellSize / 2 - camera.y) * camera.scale - size / 2;
      if (x < -size || y < -size || x > plot.viewport.width || y > plot.viewport.height) continue;
      context.fillRect(x - 1, y - 1, size + 2, size + 2);
      context.rect(x, y, size, size);
      context.moveTo(x, y);
      context.lineTo(x + size, y + size);
      context.moveTo(x + size, y);
      context.lineTo(x, y + size);
    }
  }
  context.stroke();
}
