/** Draws the claim over what was measured: hatching where nothing may be read, crosses where something was. */

import { canvasOf, type Palette, pictures } from "./tileImages.ts";
import type { Camera, Stage } from "./camera.ts";
import type { Piece } from "./tile.ts";

export interface Plot {
  camera: Camera;
  stage: Stage;
  left: number; // pixels beside the table for labels
  top: number;
  ratio: number; // device pixels for each of ours
  palette: Palette;
}

/** Snapped to device pixels, or seams would show between tiles. */
export function place(context: CanvasRenderingContext2D, plot: Plot, piece: Piece, picture: HTMLCanvasElement): void {
  const { camera, ratio } = plot;
  const snap = (value: number) => Math.round(value * ratio) / ratio;
  const x = snap((piece.column - camera.x) * camera.scale),
    y = snap((piece.row - camera.y) * camera.scale);
  const right = snap((piece.column + piece.columns * piece.step - camera.x) * camera.scale);
  const bottom = snap((piece.row + piece.rows * piece.step - camera.y) * camera.scale);
  context.drawImage(picture, x, y, right - x, bottom - y);
}

let scratch: HTMLCanvasElement | null = null;
let edges: HTMLCanvasElement | null = null;

/** Hatching where nothing may be read, and a line around it. */
export function claimed(context: CanvasRenderingContext2D, plot: Plot, pieces: Piece[]): void {
  const { stage, ratio, palette } = plot;
  const width = Math.ceil(stage.width * ratio),
    height = Math.ceil(stage.height * ratio);
  scratch = sized(scratch, width, height);
  edges = sized(edges, width, height);
  const mask = scratch.getContext("2d")!,
    line = edges.getContext("2d")!;
  mask.setTransform(ratio, 0, 0, ratio, 0, 0);
  mask.imageSmoothingEnabled = false;
  let any = false;
  for (const piece of pieces) {
    const { forbidden } = pictures(piece, palette);
    if (piece !== pieces[0]) blank(mask, plot, piece);
    if (forbidden === null) continue;
    place(mask, plot, piece, forbidden);
    any = true;
  }
  if (!any) return;
  mask.setTransform(1, 0, 0, 1, 0, 0);
  outline(line, scratch, palette.soft, Math.max(1, Math.round(ratio)));
  mask.globalCompositeOperation = "source-in";
  mask.fillStyle = hatch(mask, palette, ratio);
  mask.fillRect(0, 0, width, height);
  mask.globalCompositeOperation = "source-over";
  context.save();
  context.setTransform(1, 0, 0, 1, Math.round(plot.left * ratio), Math.round(plot.top * ratio));
  context.drawImage(scratch, 0, 0);
  context.drawImage(edges, 0, 0);
  context.restore();
}

/** A fine piece says better what the coarse one below it said. */
function blank(mask: CanvasRenderingContext2D, { camera }: Plot, piece: Piece): void {
  mask.clearRect(
    (piece.column - camera.x) * camera.scale,
    (piece.row - camera.y) * camera.scale,
    piece.columns * piece.step * camera.scale,
    piece.rows * piece.step * camera.scale,
  );
}

function sized(canvas: HTMLCanvasElement | null, width: number, height: number): HTMLCanvasElement {
  if (canvas === null || canvas.width < width || canvas.height < height) {
    return canvasOf(Math.max(width, canvas?.width ?? 0), Math.max(height, canvas?.height ?? 0));
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

/** The rim of a shape: the shape in four directions, without itself moved inwards. */
function outline(line: CanvasRenderingContext2D, shape: HTMLCanvasElement, colour: string, thick: number): void {
  line.globalCompositeOperation = "source-over";
  for (const [dx, dy] of [
    [thick, 0],
    [-thick, 0],
    [0, thick],
    [0, -thick],
  ])
    line.drawImage(shape, dx, dy);
  line.globalCompositeOperation = "destination-out";
  line.drawImage(shape, 0, 0);
  line.globalCompositeOperation = "source-in";
  line.fillStyle = colour;
  line.fillRect(0, 0, shape.width, shape.height);
  line.globalCompositeOperation = "source-over";
}

function hatch(context: CanvasRenderingContext2D, palette: Palette, ratio: number): CanvasPattern {
  const size = Math.round(7 * ratio);
  const tile = canvasOf(size, size);
  const pen = tile.getContext("2d")!;
  pen.strokeStyle = palette.soft;
  pen.globalAlpha = 0.5;
  pen.lineWidth = Math.max(1, ratio * 0.8);
  pen.beginPath();
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat")!;
}

/** Weight where none may be: a framed cross, large enough to see at any distance. */
export function strays(context: CanvasRenderingContext2D, plot: Plot, pieces: Piece[]): void {
  const { camera, palette } = plot;
  const fine = pieces.length > 1 ? pieces.slice(1) : pieces;
  context.strokeStyle = palette.alert;
  context.fillStyle = palette.paper;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const piece of fine) {
    for (const { row, column } of pictures(piece, palette).strays) {
      const size = Math.max(8, Math.min(14, piece.step * camera.scale * 0.7));
      const x = (column + piece.step / 2 - camera.x) * camera.scale - size / 2;
      const y = (row + piece.step / 2 - camera.y) * camera.scale - size / 2;
      if (x < -size || y < -size || x > plot.stage.width || y > plot.stage.height) continue;
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
