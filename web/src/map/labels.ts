/** Axis labels of a map: tokens where they fit, positions where they do not. */

import type { Token } from "../api.ts";
import { type Cluster, displayLabel, graphemeClusters } from "../graphemes.ts";
import type { Palette } from "./tileImages.ts";

export interface AxisLabels {
  clusters: Cluster[];
  texts: string[];
}

export const MIN_LABEL_SCALE = 11; // pixels per token, for a line of text
const MAX_LABEL_CHARACTERS = 24;

export function tokenLabels(tokens: readonly Token[]): AxisLabels {
  const clusters = graphemeClusters(tokens);
  return { clusters, texts: clusters.map((cluster) => truncateLabel(displayLabel(cluster.text))) };
}

/** Labels with positions instead of tokens. */
export function positionLabels(count: number): AxisLabels {
  const clusters = Array.from({ length: count }, (_, n) => ({
    first: n,
    end: n + 1,
    text: String(n),
    special: false,
  }));
  return { clusters, texts: clusters.map((cluster) => cluster.text) };
}

function truncateLabel(text: string): string {
  const characters = [...text];
  if (characters.length <= MAX_LABEL_CHARACTERS) return text;
  return `${characters.slice(0, MAX_LABEL_CHARACTERS - 1).join("")}…`;
}

/** Pixels for the longest label, within bounds. */
export function gutterSize(labels: AxisLabels, font: string, scale: number): number {
  if (scale < MIN_LABEL_SCALE) return 40;
  let width = labelWidths.get(labels);
  if (width === undefined) {
    measureContext ??= document.createElement("canvas").getContext("2d")!;
    measureContext.font = labelFont(font, scale);
    const textWidth = (text: string) => measureContext!.measureText(text).width;
    width = labels.texts.slice(0, 400).reduce((max, text) => Math.max(max, textWidth(text)), 0);
    labelWidths.set(labels, width);
  }
  return Math.round(Math.max(28, Math.min(120, width + 12)));
}

let measureContext: CanvasRenderingContext2D | null = null;
const labelWidths = new WeakMap<AxisLabels, number>();

interface AxisOptions {
  from: number; // position of the first visible token, may be fractional
  scale: number;
  length: number; // pixels
  size: number; // pixels of the gutter
  hovered: number | null;
}

/** Draws the labels of an axis; `drawAt` transforms the canvas for a position along it. */
export function drawAxis(
  context: CanvasRenderingContext2D,
  labels: AxisLabels,
  palette: Palette,
  { from, scale, length, size, hovered }: AxisOptions,
  drawAt: (at: number, draw: () => void) => void,
): void {
  const end = from + length / scale;
  const font = labelFont(palette.font, scale);
  context.font = font;
  context.textBaseline = "middle";
  const showTokens = scale >= MIN_LABEL_SCALE;
  const step = showTokens ? 1 : roundUpTick(46 / scale);
  let n = showTokens ? firstVisibleCluster(labels.clusters, from) : 0;
  const nextCluster = () => (showTokens ? labels.clusters[n++] : null);
  if (showTokens) {
    for (let cluster = nextCluster(); cluster && cluster.first < end; cluster = nextCluster()) {
      drawLabel(cluster.first, cluster.end, labels.texts[n - 1]);
    }
  } else {
    for (let at = Math.ceil(from / step) * step; at < end; at += step) {
      if (hovered === null || Math.abs(at - hovered) * scale > 22) drawLabel(at, at + 1, String(at));
    }
    if (hovered !== null) drawLabel(hovered, hovered + 1, String(hovered));
  }

  function drawLabel(first: number, end: number, text: string): void {
    const isHovered = hovered !== null && hovered >= first && hovered < end;
    const at = ((first + end) / 2 - from) * scale;
    if (at < 0 || at > length) return;
    drawAt(at, () => {
      context.fillStyle = isHovered ? palette.accent : palette.soft;
      if (isHovered) context.font = `600 ${font}`;
      if (showTokens) context.fillText(text, 0, 0, size - 6);
      else context.fillText(text, 0, 0);
      if (isHovered) context.font = font;
    });
  }
}

/** A font that is no taller than a token. */
function labelFont(face: string, scale: number): string {
  return `${scale < MIN_LABEL_SCALE ? 11 : Math.min(12.5, scale - 0.5)}px ${face}`;
}

/** Binary search for the cluster of the first visible token. */
function firstVisibleCluster(clusters: Cluster[], from: number): number {
  let low = 0,
    high = clusters.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (clusters[middle].end <= from) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The smallest of 1, 2, 5, 10, 20, … that is at least `min`. */
export function roundUpTick(min: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, min)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= min)!;
}
