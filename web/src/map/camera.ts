/** Where one looks at a map from: which token is in the corner, and how many pixels a token has. */

import type { Region } from "./tile.ts";

export interface Camera {
  x: number; // column at the left edge, in tokens
  y: number; // row at the upper edge
  scale: number; // pixels for each token
}

/** The size of the plot in pixels, and of the map in tokens. */
export interface Stage {
  width: number;
  height: number;
  rows: number;
  columns: number;
}

export const LARGEST = 44; // pixels: a token need not be larger

export function fitting(stage: Stage): number {
  return Math.max(1e-3, Math.min(LARGEST, stage.width / stage.columns, stage.height / stage.rows));
}

export function fit(stage: Stage): Camera {
  return { x: 0, y: 0, scale: fitting(stage) };
}

/** Nearer or farther, with what is under the pointer staying there. */
export function zoomed(camera: Camera, stage: Stage, factor: number, at: { x: number; y: number }): Camera {
  const scale = Math.max(fitting(stage), Math.min(Math.max(LARGEST, fitting(stage)), camera.scale * factor));
  return within(
    {
      x: camera.x + at.x / camera.scale - at.x / scale,
      y: camera.y + at.y / camera.scale - at.y / scale,
      scale,
    },
    stage,
  );
}

/** Moved by pixels. */
export function moved(camera: Camera, stage: Stage, dx: number, dy: number): Camera {
  return within({ ...camera, x: camera.x + dx / camera.scale, y: camera.y + dy / camera.scale }, stage);
}

/** So placed that a cell is in view. */
export function showing(camera: Camera, stage: Stage, row: number, column: number): Camera {
  const see = visible(camera, stage);
  const near = (value: number, low: number, high: number, size: number) =>
    value < low ? value - 1 : value + 1 > high ? value + 2 - size : low;
  return within(
    {
      ...camera,
      x: near(column, camera.x, see.right, stage.width / camera.scale),
      y: near(row, camera.y, see.bottom, stage.height / camera.scale),
    },
    stage,
  );
}

export function within(camera: Camera, stage: Stage): Camera {
  const scale = Math.max(camera.scale, fitting(stage));
  return {
    x: Math.max(0, Math.min(camera.x, stage.columns - stage.width / scale)),
    y: Math.max(0, Math.min(camera.y, stage.rows - stage.height / scale)),
    scale,
  };
}

/** The tokens that can be seen, whole or in part. */
export function visible(camera: Camera, stage: Stage): Region {
  return {
    top: Math.floor(camera.y),
    left: Math.floor(camera.x),
    bottom: Math.min(stage.rows, Math.ceil(camera.y + stage.height / camera.scale)),
    right: Math.min(stage.columns, Math.ceil(camera.x + stage.width / camera.scale)),
  };
}

export function isFit(camera: Camera, stage: Stage): boolean {
  return camera.scale <= fitting(stage) * 1.001;
}
