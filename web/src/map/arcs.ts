/** Draws a map as arcs: tokens in a column, a bow from each to those it reads; to the left what is earlier, else to the right. */

import { css } from "../colour.ts";
import { visible } from "./camera.ts";
import { axis, SMALLEST } from "./labels.ts";
import { piecesOf, type Scene } from "./matrix.ts";
import { type Piece, weighed } from "./tile.ts";

/** One bow, in tokens. */
export interface Arc {
  row: number;
  column: number;
  weight: number;
  outside: boolean; // the claim does not allow it
}

export interface ArcScene extends Scene {
  least: number; // no bow for less weight
  pair: boolean; // rows and columns are different texts: two columns of tokens
  forward: number; // the share of the width that is to the right of the tokens
}

const MOST = 3000; // bows in one picture
const CROWD = 600; // so many that they hide one another

export function drawArcs(context: CanvasRenderingContext2D, scene: ArcScene): void {
  const { camera, stage, ratio, palette, pointed } = scene;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, scene.left + stage.width, scene.top + stage.height);
  const see = visible(camera, stage);
  const pieces = piecesOf({
    ...scene,
    camera: { ...camera, x: 0 },
    stage: { ...stage, width: scene.data.columns * camera.scale, rows: scene.data.rows, columns: scene.data.columns },
  });
  const all = chosen(pieces.length > 1 && pieces[0].step > 1 ? pieces.slice(1) : pieces, scene.least, see.top, see.bottom);
  const spine = places(scene);
  const middle = (token: number) => (token + 0.5 - camera.y) * camera.scale;
  const any = pointed.row !== null || pointed.column !== null;
  const top = Math.max(1e-9, scene.data.top());
  const usual = all.length > CROWD ? 0.3 : 0.9;
  context.lineCap = "round";
  for (const arc of all) {
    const mine = arc.row === pointed.row || arc.column === pointed.column;
    context.globalAlpha = mine ? 0.9 : !any ? usual : arc.outside ? 0.5 : 0.14;
    context.strokeStyle =
      arc.outside && scene.claim ? palette.alert : css(palette.ramp, Math.max(0.25, Math.sqrt(arc.weight / top)));
    context.setLineDash(arc.outside && scene.claim ? [5, 4] : []);
    context.lineWidth = (0.5 + 2.5 * arc.weight) * (any && mine ? 1.4 : 1);
    context.beginPath();
    if (scene.pair) across(context, spine, middle(arc.row), middle(arc.column));
    else bow(context, spine, arc, middle(arc.row), middle(arc.column), see.bottom - see.top);
    context.stroke();
  }
  context.globalAlpha = 1;
  context.setLineDash([]);
  column(
    context,
    scene,
    spine.left,
    spine.gap,
    scene.pair ? "right" : "center",
    scene.rows,
    pointed.row ?? (scene.pair ? null : pointed.column),
  );
  if (scene.pair) column(context, scene, spine.right, spine.gap, "left", scene.columns, pointed.column);
}

export interface Spine {
  left: number; // where the bows to the left begin
  right: number;
  gap: number; // the room for tokens
  width: number;
}

function places(scene: ArcScene): Spine {
  const width = scene.left + scene.stage.width,
    gap = scene.left;
  if (scene.pair) {
    const side = Math.min(gap, width * 0.35);
    return { left: side, right: width - side, gap: side, width };
  }
  const left = Math.max(16, (width - gap) * (1 - scene.forward));
  return { left, right: left + gap, gap, width };
}

/** The heaviest of what the pieces show for these rows, the lightest first: the heavy are drawn over them. */
export function chosen(pieces: Piece[], least: number, from: number, to: number): Arc[] {
  const out: Arc[] = [];
  for (const piece of pieces) {
    const bar = Math.ceil(255 * Math.sqrt(least / piece.full));
    const first = Math.max(0, Math.floor((from - piece.row) / piece.step));
    const last = Math.min(piece.rows, Math.ceil((to - piece.row) / piece.step));
    const shift = Math.floor(piece.step / 2);
    for (let row = first; row < last; row++) {
      for (let column = 0, n = row * piece.columns; column < piece.columns; column++, n++) {
        if (piece.values[n] < bar || piece.values[n] === 0) continue;
        out.push({
          row: piece.row + row * piece.step + shift,
          column: piece.column + column * piece.step + shift,
          weight: weighed(piece, n),
          outside: piece.claim !== null && !piece.claim.at(row, column),
        });
      }
    }
  }
  out.sort((a, b) => a.weight - b.weight);
  return out.slice(-MOST);
}

function bow(context: CanvasRenderingContext2D, spine: Spine, arc: Arc, from: number, to: number, many: number): void {
  const back = arc.column <= arc.row;
  const room = back ? spine.left - 8 : spine.width - spine.right - 8;
  const wide = Math.max(4, room * Math.min(1, Math.sqrt((Math.abs(arc.row - arc.column) + 0.3) / many)));
  const x = back ? spine.left : spine.right;
  const tall = Math.max(3, Math.abs(from - to) / 2);
  context.ellipse(x, (from + to) / 2, wide, tall, 0, Math.PI / 2, (3 * Math.PI) / 2, !back);
}

function across(context: CanvasRenderingContext2D, spine: Spine, from: number, to: number): void {
  const bend = (spine.right - spine.left) * 0.4;
  context.moveTo(spine.left + 2, from);
  context.bezierCurveTo(spine.left + bend, from, spine.right - bend, to, spine.right - 2, to);
}

function column(
  context: CanvasRenderingContext2D,
  scene: ArcScene,
  x: number,
  size: number,
  align: CanvasTextAlign,
  labels: Scene["rows"],
  pointed: number | null,
): void {
  const { camera, stage, palette } = scene;
  context.textAlign = align;
  const at = align === "right" ? x - 6 : align === "left" ? x + 6 : x + size / 2;
  if (align === "center" && camera.scale < SMALLEST) context.textAlign = "center";
  axis(context, labels, palette, { from: camera.y, scale: camera.scale, length: stage.height, size, pointed }, (y, draw) => {
    context.save();
    context.translate(at, y);
    draw();
    context.restore();
  });
}
