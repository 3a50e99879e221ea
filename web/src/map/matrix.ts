/** Draws a map as a table: who reads in rows, who is read in columns, the claim as hatching over it. */

import { pictures } from "./tileImages.ts";
import { visible } from "./camera.ts";
import { claimed, place, type Plot, strays } from "./claimOverlay.ts";
import { axis, type Labels, SMALLEST } from "./labels.ts";
import type { MapData, Piece } from "./tile.ts";
import { wantsTiles } from "./tiling.ts";

export interface Point {
  row: number | null;
  column: number | null;
}

export interface Scene extends Plot {
  data: MapData;
  rows: Labels;
  columns: Labels;
  claim: boolean;
  pointed: Point;
  cuts: readonly number[]; // positions before which a line is drawn
}

export function drawMatrix(context: CanvasRenderingContext2D, scene: Scene): void {
  const { camera, stage, left, top, ratio, palette } = scene;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, left + stage.width, top + stage.height);
  const shown = {
    width: Math.min(stage.width, (stage.columns - camera.x) * camera.scale),
    height: Math.min(stage.height, (stage.rows - camera.y) * camera.scale),
  };
  context.save();
  context.translate(left, top);
  context.beginPath();
  context.rect(0, 0, shown.width, shown.height);
  context.clip();
  context.fillStyle = `rgb(${palette.ramp[0]} ${palette.ramp[1]} ${palette.ramp[2]})`;
  context.fillRect(0, 0, shown.width, shown.height);
  const pieces = piecesOf(scene);
  context.imageSmoothingEnabled = false;
  for (const piece of pieces) place(context, scene, piece, pictures(piece, palette).weights);
  ruled(context, scene, shown);
  if (scene.claim) claimed(context, scene, pieces);
  if (scene.claim) strays(context, scene, pieces);
  cut(context, scene, shown);
  crossed(context, scene, shown);
  context.restore();
  context.strokeStyle = palette.line;
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, shown.width + 1, shown.height + 1);
  labelled(context, scene, shown);
}

/** The coarse picture below, tiles over it where tokens are large enough to tell. */
export function piecesOf({ data, camera, stage, ratio }: Scene): Piece[] {
  const coarse = data.coarse();
  const fine = wantsTiles(camera.scale, ratio, data.rows, data.columns) ? data.fine(visible(camera, stage)) : [];
  return coarse === null ? fine : [coarse, ...fine];
}

function ruled(
  context: CanvasRenderingContext2D,
  { camera, stage, palette }: Scene,
  shown: { width: number; height: number },
): void {
  if (camera.scale < SMALLEST) return;
  const see = visible(camera, stage);
  context.strokeStyle = palette.paper;
  context.lineWidth = 1;
  context.beginPath();
  for (let column = see.left; column <= see.right; column++)
    vertical(context, (column - camera.x) * camera.scale, shown.height);
  for (let row = see.top; row <= see.bottom; row++) horizontal(context, (row - camera.y) * camera.scale, shown.width);
  context.stroke();
}

function cut(
  context: CanvasRenderingContext2D,
  { camera, palette, cuts }: Scene,
  shown: { width: number; height: number },
): void {
  context.strokeStyle = palette.ink;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const at of cuts) {
    vertical(context, (at - camera.x) * camera.scale, shown.height);
    horizontal(context, (at - camera.y) * camera.scale, shown.width);
  }
  context.stroke();
}

/** Bars around the row and the column that are pointed at. */
function crossed(
  context: CanvasRenderingContext2D,
  { camera, palette, pointed }: Scene,
  shown: { width: number; height: number },
): void {
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.25;
  const size = Math.max(2, camera.scale);
  if (pointed.row !== null) context.strokeRect(-2, (pointed.row - camera.y) * camera.scale, shown.width + 4, size);
  if (pointed.column !== null) context.strokeRect((pointed.column - camera.x) * camera.scale, -2, size, shown.height + 4);
}

function labelled(context: CanvasRenderingContext2D, scene: Scene, shown: { width: number; height: number }): void {
  const { camera, left, top, palette, pointed } = scene;
  context.save();
  context.beginPath();
  context.rect(0, top - 6, left, shown.height + 12);
  context.clip();
  context.textAlign = "right";
  axis(
    context,
    scene.rows,
    palette,
    { from: camera.y, scale: camera.scale, length: shown.height, size: left, pointed: pointed.row },
    (at, draw) => moved(context, left - 6, top + at, 0, draw),
  );
  context.restore();
  context.save();
  context.beginPath();
  context.rect(left - 6, 0, shown.width + 12, top);
  context.clip();
  context.textAlign = "left";
  axis(
    context,
    scene.columns,
    palette,
    { from: camera.x, scale: camera.scale, length: shown.width, size: top, pointed: pointed.column },
    (at, draw) => moved(context, left + at, top - 6, camera.scale < SMALLEST ? 0 : -Math.PI / 2, draw),
  );
  context.restore();
}

function moved(context: CanvasRenderingContext2D, x: number, y: number, turn: number, draw: () => void): void {
  context.save();
  context.translate(x, y);
  context.rotate(turn);
  draw();
  context.restore();
}

function vertical(context: CanvasRenderingContext2D, x: number, height: number): void {
  context.moveTo(Math.round(x) - 0.5, 0);
  context.lineTo(Math.round(x) - 0.5, height);
}

function horizontal(context: CanvasRenderingContext2D, y: number, width: number): void {
  context.moveTo(0, Math.round(y) - 0.5);
  context.lineTo(width, Math.round(y) - 0.5);
}
