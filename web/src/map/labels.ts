/** Tokens beside a map, where they fit; positions where they do not. */

import type { Token } from "../api.ts";
import { type Cluster, clusters, label } from "../graphemes.ts";
import type { Palette } from "./tileImages.ts";

export interface Labels {
  groups: Cluster[];
  texts: string[];
}

export const SMALLEST = 11; // pixels: a line of text needs so many
const LONGEST = 24; // letters of a label that are drawn

export function labelsOf(tokens: readonly Token[]): Labels {
  const groups = clusters(tokens);
  return { groups, texts: groups.map((group) => shortened(label(group.text))) };
}

/** Positions instead of tokens. */
export function numbered(count: number): Labels {
  const groups = Array.from({ length: count }, (_, n) => ({ first: n, end: n + 1, text: String(n), special: false }));
  return { groups, texts: groups.map((group) => group.text) };
}

function shortened(text: string): string {
  const letters = [...text];
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : text;
}

/** How wide the longest label of these is, in pixels, within bounds. */
export function room(labels: Labels, font: string, scale: number): number {
  if (scale < SMALLEST) return 40;
  let wide = widths.get(labels);
  if (wide === undefined) {
    measure ??= document.createElement("canvas").getContext("2d")!;
    measure.font = sized(font, scale);
    wide = labels.texts.slice(0, 400).reduce((most, text) => Math.max(most, measure!.measureText(text).width), 0);
    widths.set(labels, wide);
  }
  return Math.round(Math.max(28, Math.min(120, wide + 12)));
}

let measure: CanvasRenderingContext2D | null = null;
const widths = new WeakMap<Labels, number>();

interface Axis {
  from: number; // the first token in view, with its fraction
  scale: number;
  length: number; // pixels
  size: number; // of the gutter
  pointed: number | null;
}

/** Draws along an axis that runs to the right; the caller has turned the canvas for columns. */
export function axis(
  context: CanvasRenderingContext2D,
  labels: Labels,
  palette: Palette,
  { from, scale, length, size, pointed }: Axis,
  put: (at: number, draw: () => void) => void,
): void {
  const last = from + length / scale;
  const font = sized(palette.font, scale);
  context.font = font;
  context.textBaseline = "middle";
  const fits = scale >= SMALLEST;
  const stride = fits ? 1 : nice(46 / scale);
  let n = fits ? lowest(labels.groups, from) : 0;
  const next = () => (fits ? labels.groups[n++] : null);
  if (fits) {
    for (let group = next(); group && group.first < last; group = next()) {
      write(group.first, group.end, labels.texts[n - 1]);
    }
  } else {
    for (let at = Math.ceil(from / stride) * stride; at < last; at += stride) {
      if (pointed === null || Math.abs(at - pointed) * scale > 22) write(at, at + 1, String(at));
    }
    if (pointed !== null) write(pointed, pointed + 1, String(pointed));
  }

  function write(first: number, end: number, text: string): void {
    const lit = pointed !== null && pointed >= first && pointed < end;
    const at = ((first + end) / 2 - from) * scale;
    if (at < 0 || at > length) return;
    put(at, () => {
      context.fillStyle = lit ? palette.accent : palette.soft;
      if (lit) context.font = `600 ${font}`;
      if (fits) context.fillText(text, 0, 0, size - 6);
      else context.fillText(text, 0, 0);
      if (lit) context.font = font;
    });
  }
}

/** A line of text is no taller than its token. */
function sized(face: string, scale: number): string {
  return `${scale < SMALLEST ? 11 : Math.min(12.5, scale - 0.5)}px ${face}`;
}

/** The group that holds the first token in view. */
function lowest(groups: Cluster[], from: number): number {
  let low = 0,
    high = groups.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (groups[middle].end <= from) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** 1, 2, 5, 10, 20, … at least this. */
export function nice(least: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least)!;
}
