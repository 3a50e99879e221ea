/** Draws a map as a matrix: queries in rows, keys in columns, the claimed mask as hatching over it. */

import { visibleRegion } from "./camera.ts";
import { drawClaim, drawOutsideCells, drawTileImage, type PlotLayout } from "./claimOverlay.ts";
import { type AxisLabels, drawAxis, MIN_LABEL_SCALE } from "./labels.ts";
import type { MapData, Tile } from "./tile.ts";
import { tileImages } from "./tileImages.ts";
import { needsTiles } from "./tiling.ts";

export interface CellPosition {
  row: number | null;
  column: number | null;
}

export interface MatrixPlot extends PlotLayout {
  data: MapData;
  rows: AxisLabels;
  columns: AxisLabels;
  showClaim: boolean;
  hovered: CellPosition;
  boundaries: readonly number[]; // positions before which a line is drawn
}

export function drawMatrix(context: CanvasRenderingContext2D, plot: MatrixPlot): void {
  const { camera, viewport, left, top, pixelRatio, palette } = plot;
  context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  context.clearRect(0, 0, left + viewport.width, top + viewport.height);
  const size = {
    width: Math.min(viewport.width, (viewport.columns - camera.x) * camera.scale),
    height: Math.min(viewport.height, (viewport.rows - camera.y) * camera.scale),
  };
  context.save();
  context.translate(left, top);
  context.beginPath();
  context.rect(0, 0, size.width, size.height);
  context.clip();
  context.fillStyle = `rgb(${palette.ramp[0]} ${palette.ramp[1]} ${palette.ramp[2]})`;
  context.fillRect(0, 0, size.width, size.height);
  const tiles = tilesInView(plot);
  context.imageSmoothingEnabled = false;
  for (const tile of tiles) drawTileImage(context, plot, tile, tileImages(tile, palette).weights);
  drawGridLines(context, plot, size);
  if (plot.showClaim) drawClaim(context, plot, tiles);
  if (plot.showClaim) drawOutsideCells(context, plot, tiles);
  drawBoundaries(context, plot, size);
  drawCrosshair(context, plot, size);
  context.restore();
  context.strokeStyle = palette.line;
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, size.width + 1, size.height + 1);
  drawLabels(context, plot, size);
}

/** The overview, and over it the tiles if the scale is large enough to show a difference. */
export function tilesInView({ data, camera, viewport, pixelRatio }: MatrixPlot): Tile[] {
  const overview = data.overview();
  const tiles = needsTiles(camera.scale, pixelRatio, data.rows, data.columns)
    ? data.tiles(visibleRegion(camera, viewport))
    : [];
  return overview === null ? tiles : [overview, ...tiles];
}

function drawGridLines(
  context: CanvasRenderingContext2D,
  { camera, viewport, palette }: MatrixPlot,
  size: { width: number; height: number },
): void {
  if (camera.scale < MIN_LABEL_SCALE) return;
  const region = visibleRegion(camera, viewport);
  context.strokeStyle = palette.paper;
  context.lineWidth = 1;
  context.beginPath();
  for (let column = region.left; column <= region.right; column++)
    addVerticalLine(context, (column - camera.x) * camera.scale, size.height);
  for (let row = region.top; row <= region.bottom; row++) {
    addHorizontalLine(context, (row - camera.y) * camera.scale, size.width);
  }
  context.stroke();
}

function drawBoundaries(
  context: CanvasRenderingContext2D,
  { camera, palette, boundaries }: MatrixPlot,
  size: { width: number; height: number },
): void {
  context.strokeStyle = palette.ink;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const at of boundaries) {
    addVerticalLine(context, (at - camera.x) * camera.scale, size.height);
    addHorizontalLine(context, (at - camera.y) * camera.scale, size.width);
  }
  context.stroke();
}

/** Frames around the hovered row and column. */
function drawCrosshair(
  context: CanvasRenderingContext2D,
  { camera, palette, hovered }: MatrixPlot,
  size: { width: number; height: number },
): void {
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.25;
  const cellSize = Math.max(2, camera.scale);
  if (hovered.row !== null) {
    context.strokeRect(-2, (hovered.row - camera.y) * camera.scale, size.width + 4, cellSize);
  }
  if (hovered.column !== null) {
    context.strokeRect((hovered.column - camera.x) * camera.scale, -2, cellSize, size.height + 4);
  }
}

function drawLabels(
  context: CanvasRenderingContext2D,
  plot: MatrixPlot,
  size: { width: number; height: number },
): void {
  const { camera, left, top, palette, hovered } = plot;
  context.save();
  context.beginPath();
  context.rect(0, top - 6, left, size.height + 12);
  context.clip();
  context.textAlign = "right";
  drawAxis(
    context,
    plot.rows,
    palette,
    { from: camera.y, scale: camera.scale, length: size.height, size: left, hovered: hovered.row },
    (at, draw) => drawTransformed(context, left - 6, top + at, 0, draw),
  );
  context.restore();
  context.save();
  context.beginPath();
  context.rect(left - 6, 0, size.width + 12, top);
  context.clip();
  context.textAlign = "left";
  const angle = camera.scale < MIN_LABEL_SCALE ? 0 : -Math.PI / 2;
  drawAxis(
    context,
    plot.columns,
    palette,
    { from: camera.x, scale: camera.scale, length: size.width, size: top, hovered: hovered.column },
    (at, draw) => drawTransformed(context, left + at, top - 6, angle, draw),
  );
  context.restore();
}

function drawTransformed(
  context: CanvasRenderingContext2D,
  x: number,
  y: number,
  angle: number,
  draw: () => void,
): void {
  context.save();
  context.translate(x, y);
  context.rotate(angle);
  draw();
  context.restore();
}

function addVerticalLine(context: CanvasRenderingContext2D, x: number, height: number): void {
  context.moveTo(Math.round(x) - 0.5, 0);
  context.lineTo(Math.round(x) - 0.5, height);
}

function addHorizontalLine(context: CanvasRenderingContext2D, y: number, width: number): void {
  context.moveTo(0, Math.round(y) - 0.5);
  context.lineTo(width, Math.round(y) - 0.5);
}
