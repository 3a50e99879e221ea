/** One canvas with a map on it: keeps the camera, and draws at most once a frame, when something has changed. */

import { type ArcScene, drawArcs } from "./arcs.ts";
import type { Palette } from "./tileImages.ts";
import { type Camera, fit, fitting, isFit, LARGEST, moved, showing, type Stage, within, zoomed } from "./camera.ts";
import { gestures } from "./gestures.ts";
import { type Labels, room, SMALLEST } from "./labels.ts";
import { drawMatrix, type Point, type Scene } from "./matrix.ts";
import type { MapData } from "./tile.ts";

export type Mode = "matrix" | "arcs";

export interface Shown {
  data: MapData;
  rows: Labels;
  columns: Labels;
  mode: Mode;
  claim: boolean;
  palette: Palette;
  least: number;
  pair: boolean;
  forward: number;
  cuts: readonly number[];
  tallest: number; // pixels
}

export class Viewer {
  private camera: Camera = { x: 0, y: 0, scale: 1 };
  private pointed: Point = { row: null, column: null };
  private width = 0;
  private height = 0;
  private frame = 0;
  private touched = false; // the reader has moved the camera: do not move it back
  private readonly ends: (() => void)[] = [];
  private unlisten: () => void = () => undefined;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private shown: Shown,
    private readonly onPoint: (point: Point | null) => void,
  ) {
    const watch = new ResizeObserver(([entry]) => this.resize(entry.contentRect.width));
    watch.observe(canvas.parentElement!);
    this.ends.push(() => watch.disconnect());
    this.ends.push(
      gestures(canvas, {
        zoom: (factor, at) => this.zoom(factor, at),
        move: (dx, dy) => this.look(moved(this.camera, this.stage(), this.shown.mode === "arcs" ? 0 : dx, dy)),
        fit: () => this.fit(),
        point: (at) => this.onPoint(at === null ? null : this.under(at)),
        whole: () => isFit(this.camera, this.stage()),
      }),
    );
    this.show(shown);
  }

  end(): void {
    cancelAnimationFrame(this.frame);
    this.unlisten();
    for (const end of this.ends) end();
  }

  show(shown: Shown): void {
    const same =
      shown.data.rows === this.shown.data.rows &&
      shown.data.columns === this.shown.data.columns &&
      shown.mode === this.shown.mode;
    this.unlisten();
    this.shown = shown;
    this.unlisten = shown.data.listen(() => this.draw());
    if (!same) this.touched = false;
    this.resize(this.width);
  }

  point(point: Point): void {
    if (point.row === this.pointed.row && point.column === this.pointed.column) return;
    this.pointed = point;
    this.draw();
  }

  /** Brings a cell into view where it is not. */
  reveal(point: Point): void {
    if (isFit(this.camera, this.stage())) return;
    const { y, x } = this.camera;
    this.look(showing(this.camera, this.stage(), point.row ?? Math.ceil(y), point.column ?? Math.ceil(x)));
  }

  zoom(factor: number, at: { x: number; y: number } | null): void {
    const stage = this.stage(),
      { left, top } = this.gutters();
    const where =
      at === null ? { x: stage.width / 2, y: stage.height / 2 } : { x: Math.max(0, at.x - left), y: Math.max(0, at.y - top) };
    this.touched = true;
    this.look(zoomed(this.camera, stage, factor, where));
  }

  fit(): void {
    this.touched = false;
    this.look(fit(this.stage()));
  }

  private look(camera: Camera): void {
    this.camera = within(camera, this.stage());
    this.canvas.style.touchAction = isFit(this.camera, this.stage()) ? "pan-y" : "none";
    this.draw();
  }

  /** Labels need room where they fit; a first guess at the scale says whether they do. */
  private gutters(near = this.touched ? this.camera.scale : 0): { left: number; top: number } {
    const { data, rows, columns, palette, mode, tallest } = this.shown;
    if (mode === "arcs") return { left: room(rows, palette.font, SMALLEST), top: 0 };
    const guess = Math.min(LARGEST, (this.width - 60) / data.columns, tallest / data.rows);
    const scale = Math.max(guess, near);
    return { left: room(rows, palette.font, scale), top: scale < SMALLEST ? 22 : room(columns, palette.font, scale) };
  }

  private stage(): Stage {
    const { data, mode, pair } = this.shown;
    const { left, top } = this.gutters();
    const size = { width: Math.max(40, this.width - left - 1), height: Math.max(40, this.height - top - 1) };
    if (mode === "arcs") return { ...size, rows: Math.max(data.rows, pair ? data.columns : 0), columns: 1 };
    return { ...size, rows: data.rows, columns: data.columns };
  }

  private resize(width: number): void {
    const { data, mode, pair, tallest } = this.shown,
      { left, top } = this.gutters(0);
    this.width = width;
    this.height =
      1 +
      Math.min(
        tallest,
        mode === "arcs"
          ? Math.max(data.rows, pair ? data.columns : 0) * 24
          : top + data.rows * Math.min(LARGEST, Math.max(40, width - left - 1) / data.columns),
      );
    const ratio = window.devicePixelRatio || 1;
    const size = { width: Math.round(width * ratio), height: Math.round(this.height * ratio) };
    if (this.canvas.width !== size.width || this.canvas.height !== size.height) {
      Object.assign(this.canvas, size);
      this.canvas.style.height = `${this.height}px`;
      this.canvas.style.width = `${width}px`;
    }
    this.look(this.touched ? this.camera : this.start(this.stage()));
  }

  /** A table is shown whole at first; a long column of tokens from where it can be read. */
  private start(stage: Stage): Camera {
    return this.shown.mode === "arcs" ? { x: 0, y: 0, scale: Math.max(fitting(stage), Math.min(20, LARGEST)) } : fit(stage);
  }

  private draw(): void {
    if (this.frame !== 0) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.width === 0) return;
      const context = this.canvas.getContext("2d")!;
      const { data, palette, rows, columns, claim, cuts } = this.shown;
      const scene: Scene = {
        data,
        palette,
        rows,
        columns,
        claim,
        cuts,
        camera: this.camera,
        stage: this.stage(),
        ...this.gutters(),
        ratio: window.devicePixelRatio || 1,
        pointed: this.pointed,
      };
      if (this.shown.mode === "matrix") drawMatrix(context, scene);
      else {
        const { least, pair, forward } = this.shown;
        drawArcs(context, { ...scene, least, pair, forward } satisfies ArcScene);
      }
    });
  }

  private under(at: { x: number; y: number }): Point | null {
    const { left, top } = this.gutters(),
      { data, mode, pair } = this.shown;
    const row = Math.floor((at.y - (mode === "arcs" ? 0 : top)) / this.camera.scale + this.camera.y);
    if (mode === "arcs") {
      if (pair && at.x > this.width / 2) return row < data.columns ? { row: null, column: row } : null;
      return row >= 0 && row < data.rows ? { row, column: pair ? null : row } : null;
    }
    const column = Math.floor((at.x - left) / this.camera.scale + this.camera.x);
    const inRow = at.y >= top && row < data.rows,
      inColumn = at.x >= left && column < data.columns;
    return inRow || inColumn ? { row: inRow ? row : null, column: inColumn ? column : null } : null;
  }
}
