/** The camera over a map: which cell is in the top left corner, and how many pixels a token has. */

import type { Region } from "./tile.ts";

export interface Camera {
  x: number; // column at the left edge, in tokens
  y: number; // row at the top edge
  scale: number; // pixels per token
}

/** The size of the plot in pixels, and of the map in tokens. */
export interface Viewport {
  width: number;
  height: number;
  rows: number;
  columns: number;
}

export const MAX_SCALE = 44; // pixels per token

/** The scale at which all of the map is visible. */
export function fitScale(viewport: Viewport): number {
  const { width, height, rows, columns } = viewport;
  return Math.max(1e-3, Math.min(MAX_SCALE, width / columns, height / rows));
}

export function fitCamera(viewport: Viewport): Camera {
  return { x: 0, y: 0, scale: fitScale(viewport) };
}

/** Zoom around a point in pixels: what is under it stays there. */
export function zoomCamera(
  camera: Camera,
  viewport: Viewport,
  factor: number,
  at: { x: number; y: number },
): Camera {
  const minScale = fitScale(viewport);
  const scale = Math.max(minScale, Math.min(Math.max(MAX_SCALE, minScale), camera.scale * factor));
  return clampCamera(
    {
      x: camera.x + at.x / camera.scale - at.x / scale,
      y: camera.y + at.y / camera.scale - at.y / scale,
      scale,
    },
    viewport,
  );
}

/** Pan by pixels. */
export function panCamera(camera: Camera, viewport: Viewport, dx: number, dy: number): Camera {
  const { x, y, scale } = camera;
  return clampCamera({ x: x + dx / scale, y: y + dy / scale, scale }, viewport);
}

/** Pan as far as needed to bring a cell into view. */
export function revealCell(camera: Camera, viewport: Viewport, row: number, column: number): Camera {
  const region = visibleRegion(camera, viewport);
  const scrollTo = (value: number, low: number, high: number, size: number) =>
    value < low ? value - 1 : value + 1 > high ? value + 2 - size : low;
  return clampCamera(
    {
      ...camera,
      x: scrollTo(column, camera.x, region.right, viewport.width / camera.scale),
      y: scrollTo(row, camera.y, region.bottom, viewport.height / camera.scale),
    },
    viewport,
  );
}

/** Keep the camera on the map. */
export function clampCamera(camera: Camera, viewport: Viewport): Camera {
  const scale = Math.max(camera.scale, fitScale(viewport));
  return {
    x: Math.max(0, Math.min(camera.x, viewport.columns - viewport.width / scale)),
    y: Math.max(0, Math.min(camera.y, viewport.rows - viewport.height / scale)),
    scale,
  };
}

/** The cells that are visible, at least in part. */
export function visibleRegion(camera: Camera, viewport: Viewport): Region {
  return {
    top: Math.floor(camera.y),
    left: Math.floor(camera.x),
    bottom: Math.min(viewport.rows, Math.ceil(camera.y + viewport.height / camera.scale)),
    right: Math.min(viewport.columns, Math.ceil(camera.x + viewport.width / camera.scale)),
  };
}

export function isFullyVisible(camera: Camera, viewport: Viewport): boolean {
  return camera.scale <= fitScale(viewport) * 1.001;
}
