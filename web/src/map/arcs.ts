/** Draws a map as arcs from queries to keys: to earlier tokens on the left, to later ones on the right. */

import { rampColour } from "../colour.ts";
import { visibleRegion } from "./camera.ts";
import { drawAxis, MIN_LABEL_SCALE } from "./labels.ts";
import { type MatrixPlot, tilesInView } from "./matrix.ts";
import { cellWeight, type Tile } from "./tile.ts";

/** One arc; row and column are tokens. */
export interface Arc {
  row: number;
  column: number;
  weight: number;
  outside: boolean; // not allowed by the claim
}

export interface ArcPlot extends MatrixPlot {
  minWeight: number; // weaker arcs are not drawn
  isCross: boolean; // rows and columns are different texts, drawn as two columns of tokens
  forwardFraction: number; // of the width, for arcs on the right
}

const MAX_ARCS = 3000; // drawn at most
const CROWDED_ARCS = 600; // more than these are drawn transparently

export function drawArcs(context: CanvasRenderingContext2D, plot: ArcPlot): void {
  const { camera, viewport, pixelRatio, palette, hovered } = plot;
  context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  context.clearRect(0, 0, plot.left + viewport.width, plot.top + viewport.height);
  const region = visibleRegion(camera, viewport);
  const tiles = tilesInView({
    ...plot,
    camera: { ...camera, x: 0 },
    viewport: {
      ...viewport,
      width: plot.data.columns * camera.scale,
      rows: plot.data.rows,
      columns: plot.data.columns,
    },
  });
  const fineTiles = tiles.length > 1 && tiles[0].cellSize > 1 ? tiles.slice(1) : tiles;
  const arcs = strongestArcs(fineTiles, plot.minWeight, region.top, region.bottom);
  const layout = arcLayout(plot);
  const tokenY = (token: number) => (token + 0.5 - camera.y) * camera.scale;
  const isHovering = hovered.row !== null || hovered.column !== null;
  const maxWeight = Math.max(1e-9, plot.data.maxWeight());
  const defaultAlpha = arcs.length > CROWDED_ARCS ? 0.3 : 0.9;
  context.lineCap = "round";
  for (const arc of arcs) {
    const isHovered = arc.row === hovered.row || arc.column === hovered.column;
    context.globalAlpha = isHovered ? 0.9 : !isHovering ? defaultAlpha : arc.outside ? 0.5 : 0.14;
    const isAlert = arc.outside && plot.showClaim;
    const colourValue = Math.max(0.25, Math.sqrt(arc.weight / maxWeight));
    context.strokeStyle = isAlert ? palette.alert : rampColour(palette.ramp, colourValue);
    context.setLineDash(isAlert ? [5, 4] : []);
    context.lineWidth = (0.5 + 2.5 * arc.weight) * (isHovering && isHovered ? 1.4 : 1);
    context.beginPath();
    if (plot.isCross) addCrossLink(context, layout, tokenY(arc.row), tokenY(arc.column));
    else addArc(context, layout, arc, tokenY(arc.row), tokenY(arc.column), region.bottom - region.top);
    context.stroke();
  }
  context.globalAlpha = 1;
  context.setLineDash([]);
  drawTokenColumn(
    context,
    plot,
    layout.left,
    layout.labelWidth,
    plot.isCross ? "right" : "center",
    plot.rows,
    hovered.row ?? (plot.isCross ? null : hovered.column),
  );
  if (plot.isCross) {
    drawTokenColumn(context, plot, layout.right, layout.labelWidth, "left", plot.columns, hovered.column);
  }
}

export interface ArcLayout {
  left: number; // where arcs on the left start
  right: number;
  labelWidth: number; // of the tokens between them
  width: number;
}

function arcLayout(plot: ArcPlot): ArcLayout {
  const width = plot.left + plot.viewport.width,
    labelWidth = plot.left;
  if (plot.isCross) {
    const crossLabelWidth = Math.min(labelWidth, width * 0.35);
    return { left: crossLabelWidth, right: width - crossLabelWidth, labelWidth: crossLabelWidth, width };
  }
  const left = Math.max(16, (width - labelWidth) * (1 - plot.forwardFraction));
  return { left, right: left + labelWidth, labelWidth, width };
}

/** The strongest arcs of these rows in ascending order, so that stronger ones are drawn on top. */
export function strongestArcs(tiles: Tile[], minWeight: number, firstRow: number, endRow: number): Arc[] {
  const arcs: Arc[] = [];
  for (const tile of tiles) {
    const minByte = Math.ceil(255 * Math.sqrt(minWeight / tile.maxWeight));
    const first = Math.max(0, Math.floor((firstRow - tile.row) / tile.cellSize));
    const last = Math.min(tile.rows, Math.ceil((endRow - tile.row) / tile.cellSize));
    const cellCentre = Math.floor(tile.cellSize / 2);
    for (let row = first; row < last; row++) {
      for (let column = 0, n = row * tile.columns; column < tile.columns; column++, n++) {
        if (tile.values[n] < minByte || tile.values[n] === 0) continue;
        arcs.push({
          row: tile.row + row * tile.cellSize + cellCentre,
          column: tile.column + column * tile.cellSize + cellCentre,
          weight: cellWeight(tile, n),
          outside: tile.claim !== null && !tile.claim.at(row, column),
        });
      }
    }
  }
  arcs.sort((a, b) => a.weight - b.weight);
  return arcs.slice(-MAX_ARCS);
}

function addArc(
  context: CanvasRenderingContext2D,
  layout: ArcLayout,
  arc: Arc,
  from: number,
  to: number,
  visibleRows: number,
): void {
  const isBackward = arc.column <= arc.row;
  const availableWidth = isBackward ? layout.left - 8 : layout.width - layout.right - 8;
  const relativeDistance = (Math.abs(arc.row - arc.column) + 0.3) / visibleRows;
  const radiusX = Math.max(4, availableWidth * Math.min(1, Math.sqrt(relativeDistance)));
  const x = isBackward ? layout.left : layout.right;
  const radiusY = Math.max(3, Math.abs(from - to) / 2);
  context.ellipse(x, (from + to) / 2, radiusX, radiusY, 0, Math.PI / 2, (3 * Math.PI) / 2, !isBackward);
}

function addCrossLink(context: CanvasRenderingContext2D, layout: ArcLayout, from: number, to: number): void {
  const { left, right } = layout;
  const offset = (right - left) * 0.4;
  context.moveTo(left + 2, from);
  context.bezierCurveTo(left + offset, from, right - offset, to, right - 2, to);
}

function drawTokenColumn(
  context: CanvasRenderingContext2D,
  plot: ArcPlot,
  x: number,
  size: number,
  align: CanvasTextAlign,
  labels: MatrixPlot["rows"],
  hovered: number | null,
): void {
  const { camera, viewport, palette } = plot;
  context.textAlign = align;
  const labelX = align === "right" ? x - 6 : align === "left" ? x + 6 : x + size / 2;
  if (align === "center" && camera.scale < MIN_LABEL_SCALE) context.textAlign = "center";
  const axis = { from: camera.y, scale: camera.scale, length: viewport.height, size, hovered };
  drawAxis(context, labels, palette, axis, (y, draw) => {
    context.save();
    context.translate(labelX, y);
    draw();
    context.restore();
  });
}
