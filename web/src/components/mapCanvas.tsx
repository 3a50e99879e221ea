/** A map on the page: the canvas, its buttons, and the words that go with it. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Held } from "../store.ts";
import type { Labels } from "../map/labels.ts";
import type { Point } from "../map/matrix.ts";
import type { MapData } from "../map/tile.ts";
import { type Mode, type Shown, Viewer } from "../map/mapViewer.ts";
import { usePalette } from "../shell/hooks.ts";

interface Props {
  title: string;
  data: MapData;
  rows: Labels;
  columns: Labels;
  pointed: Held<Point>;
  onPoint(point: Point | null): void;
  mode?: Mode;
  claim?: boolean;
  least?: number;
  pair?: boolean;
  forward?: number;
  cuts?: readonly number[];
  tallest?: number;
  buttons?: boolean;
}

const NONE: readonly number[] = [];

export function MapCanvas({
  title,
  data,
  rows,
  columns,
  pointed,
  onPoint,
  mode = "matrix",
  claim = true,
  least = 0.05,
  pair = false,
  forward = 0.5,
  cuts = NONE,
  tallest = 620,
  buttons = true,
}: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const viewer = useRef<Viewer | null>(null);
  const palette = usePalette();
  const heard = useRef(onPoint);
  heard.current = onPoint;
  const shown = useMemo<Shown>(
    () => ({ data, rows, columns, mode, claim, palette, least, pair, forward, cuts, tallest }),
    [data, rows, columns, mode, claim, palette, least, pair, forward, cuts, tallest],
  );
  useEffect(() => {
    const made = new Viewer(canvas.current!, shown, (point) => heard.current(point));
    viewer.current = made;
    return () => made.end();
  }, []);
  useEffect(() => viewer.current!.show(shown), [shown]);
  useEffect(() => {
    viewer.current?.point(pointed.get());
    return pointed.listen((point) => viewer.current?.point(point));
  }, [pointed]);
  return (
    <div class="map">
      <div class="sheet-of">
        <canvas
          ref={canvas}
          tabIndex={0}
          role="img"
          aria-label={`${title}: ${data.rows} rows, ${data.columns} columns`}
          aria-description="Plus and minus zoom, arrow keys move, 0 shows all of it."
        />
      </div>
      {buttons && (
        <div class="zooms" role="group" aria-label={`Size of ${title}`}>
          <button type="button" class="icon" aria-label="Nearer" onClick={() => viewer.current!.zoom(1.6, null)}>
            +
          </button>
          <button type="button" class="icon" aria-label="Farther" onClick={() => viewer.current!.zoom(1 / 1.6, null)}>
            −
          </button>
          <button type="button" class="icon" aria-label="All of it" onClick={() => viewer.current!.fit()}>
            ⤢
          </button>
        </div>
      )}
    </div>
  );
}
