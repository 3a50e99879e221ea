/** Draws a map on a canvas: it owns the camera, and redraws at most once per frame when something changed. */

import { type ArcPlot, drawArcs } from "./arcs.ts";
import {
  type Camera,
  clampCamera,
  fitCamera,
  fitScale,
  isFullyVisible,
  MAX_SCALE,
  panCamera,
  revealCell,
  type Viewport,
  zoomCamera,
} from "./camera.ts";
import { attachGestures } from "./gestures.ts";
import { type AxisLabels, gutterSize, MIN_LABEL_SCALE } from "./labels.ts";
import { type CellPosition, drawMatrix, type MatrixPlot } from "./matrix.ts";
import type { MapData } from "./tile.ts";
import type { Palette } from "./tileImages.ts";

export type MapMode = "matrix" | "arcs";

export interface MapOptions {
  data: MapData;
  rows: AxisLabels;
  columns: AxisLabels;
  mode: MapMode;
  showClaim: boolean;
  palette: Palette;
  minWeight: number;
  isCross: boolean;
  forwardFraction: number;
  boundaries: readonly number[];
  maxHeight: number; // pixels
}

export class MapViewer {
  private camera: Camera = { x: 0, y: 0, scale: 1 };
  private hovered: CellPosition = { row: null, column: null };
  private width = 0;
  private height = 0;
  private frame = 0;
  private isMovedByUser = false; // then a resize keeps the camera
  private readonly disposers: (() => void)[] = [];
  private unsubscribe: () => void = () => undefined;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private options: MapOptions,
    private readonly onHover: (point: CellPosition | null) => void,
  ) {
    const observer = new ResizeObserver(([entry]) => this.resize(entry.contentRect.width));
    observer.observe(canvas.parentElement!);
    this.disposers.push(() => observer.disconnect());
    this.disposers.push(
      attachGestures(canvas, {
        zoom: (factor, at) => this.zoom(factor, at),
        pan: (dx, dy) => this.pan(this.options.mode === "arcs" ? 0 : dx, dy),
        fit: () => this.fit(),
        hover: (at) => this.onHover(at === null ? null : this.cellAt(at)),
        isFullyVisible: () => isFullyVisible(this.camera, this.viewport()),
      }),
    );
    this.update(options);
  }

  dispose(): void {
    cancelAnimationFrame(this.frame);
    this.unsubscribe();
    for (const dispose of this.disposers) dispose();
  }

  update(options: MapOptions): void {
    const isSameLayout =
      options.data.rows === this.options.data.rows &&
      options.data.columns === this.options.data.columns &&
      options.mode === this.options.mode;
    this.unsubscribe();
    this.options = options;
    this.unsubscribe = options.data.subscribe(() => this.scheduleDraw());
    if (!isSameLayout) this.isMovedByUser = false;
    this.resize(this.width);
  }

  setHovered(cell: CellPosition): void {
    if (cell.row === this.hovered.row && cell.column === this.hovered.column) return;
    this.hovered = cell;
    this.scheduleDraw();
  }

  /** Bring a cell into view. */
  reveal(cell: CellPosition): void {
    if (isFullyVisible(this.camera, this.viewport())) return;
    const { y, x } = this.camera;
    const row = cell.row ?? Math.ceil(y),
      column = cell.column ?? Math.ceil(x);
    this.setCamera(revealCell(this.camera, this.viewport(), row, column));
  }

  zoom(factor: number, at: { x: number; y: number } | null): void {
    const viewport = this.viewport(),
      { left, top } = this.gutters();
    const anchor =
      at === null
        ? { x: viewport.width / 2, y: viewport.height / 2 }
        : { x: Math.max(0, at.x - left), y: Math.max(0, at.y - top) };
    this.isMovedByUser = true;
    this.setCamera(zoomCamera(this.camera, viewport, factor, anchor));
  }

  pan(dx: number, dy: number): void {
    this.setCamera(panCamera(this.camera, this.viewport(), dx, dy));
  }

  fit(): void {
    this.isMovedByUser = false;
    this.setCamera(fitCamera(this.viewport()));
  }

  private setCamera(camera: Camera): void {
    this.camera = clampCamera(camera, this.viewport());
    this.canvas.style.touchAction = isFullyVisible(this.camera, this.viewport()) ? "pan-y" : "none";
    this.scheduleDraw();
  }

  /** Space for labels, which are drawn only where they fit: it depends on an estimate of the scale. */
  private gutters(currentScale = this.isMovedByUser ? this.camera.scale : 0): { left: number; top: number } {
    const { data, rows, columns, palette, mode, maxHeight } = this.options;
    if (mode === "arcs") return { left: gutterSize(rows, palette.font, MIN_LABEL_SCALE), top: 0 };
    const fittedScale = Math.min(MAX_SCALE, (this.width - 60) / data.columns, maxHeight / data.rows);
    const scale = Math.max(fittedScale, currentScale);
    return {
      left: gutterSize(rows, palette.font, scale),
      top: scale < MIN_LABEL_SCALE ? 22 : gutterSize(columns, palette.font, scale),
    };
  }

  private viewport(): Viewport {
    const { data, mode, isCross } = this.options;
    const { left, top } = this.gutters();
    const size = { width: Math.max(40, this.width - left - 1), height: Math.max(40, this.height - top - 1) };
    if (mode === "arcs") {
      return { ...size, rows: Math.max(data.rows, isCross ? data.columns : 0), columns: 1 };
    }
    return { ...size, rows: data.rows, columns: data.columns };
  }

  private resize(width: number): void {
    const { data, mode, isCross, maxHeight } = this.options,
      { left, top } = this.gutters(0);
    this.width = width;
    this.height =
      1 +
      Math.min(
        maxHeight,
        mode === "arcs"
          ? Math.max(data.rows, isCross ? data.columns : 0) * 24
          : top + data.rows * Math.min(MAX_SCALE, Math.max(40, width - left - 1) / data.columns),
      );
    const ratio = window.devicePixelRatio || 1;
    const size = { width: Math.round(width * ratio), height: Math.round(this.height * ratio) };
    if (this.canvas.width !== size.width || this.canvas.height !== size.height) {
      Object.assign(this.canvas, size);
      this.canvas.style.height = `${this.height}px`;
      this.canvas.style.width = `${width}px`;
    }
    this.setCamera(this.isMovedByUser ? this.camera : this.initialCamera(this.viewport()));
  }

  /** A matrix is fitted into the view; arcs start at the top, at a scale at which tokens are readable. */
  private initialCamera(viewport: Viewport): Camera {
    if (this.options.mode !== "arcs") return fitCamera(viewport);
    return { x: 0, y: 0, scale: Math.max(fitScale(viewport), Math.min(20, MAX_SCALE)) };
  }

  private scheduleDraw(): void {
    if (this.frame !== 0) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.width === 0) return;
      const context = this.canvas.getContext("2d")!;
      const { data, palette, rows, columns, showClaim, boundaries } = this.options;
      const plot: MatrixPlot = {
        data,
        palette,
        rows,
        columns,
        showClaim,
        boundaries,
        camera: this.camera,
        viewport: this.viewport(),
        ...this.gutters(),
        pixelRatio: window.devicePixelRatio || 1,
        hovered: this.hovered,
      };
      if (this.options.mode === "matrix") drawMatrix(context, plot);
      else {
        const { minWeight, isCross, forwardFraction } = this.options;
        drawArcs(context, { ...plot, minWeight, isCross, forwardFraction } satisfies ArcPlot);
      }
    });
  }

  private cellAt(position: { x: number; y: number }): CellPosition | null {
    const { left, top } = this.gutters(),
      { data, mode, isCross } = this.options;
    const row = Math.floor((position.y - (mode === "arcs" ? 0 : top)) / this.camera.scale + this.camera.y);
    if (mode === "arcs") {
      if (isCross && position.x > this.width / 2) {
        return row < data.columns ? { row: null, column: row } : null;
      }
      return row >= 0 && row < data.rows ? { row, column: isCross ? null : row } : null;
    }
    const column = Math.floor((position.x - left) / this.camera.scale + this.camera.x);
    const inRow = position.y >= top && row < data.rows,
      inColumn = position.x >= left && column < data.columns;
    return inRow || inColumn ? { row: inRow ? row : null, column: inColumn ? column : null } : null;
  }
}
