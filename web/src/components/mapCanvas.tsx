/** A map on the page: its canvas and zoom buttons. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import type { AxisLabels } from "../map/labels.ts";
import { type MapMode, type MapOptions, MapViewer } from "../map/mapViewer.ts";
import type { CellPosition } from "../map/matrix.ts";
import type { MapData } from "../map/tile.ts";
import { usePalette } from "../shell/hooks.ts";
import type { Store } from "../store.ts";

interface Props {
  title: string;
  data: MapData;
  rows: AxisLabels;
  columns: AxisLabels;
  hovered: Store<CellPosition>;
  onHover(point: CellPosition | null): void;
  mode?: MapMode;
  showClaim?: boolean;
  minWeight?: number;
  isCross?: boolean;
  forwardFraction?: number;
  boundaries?: readonly number[];
  maxHeight?: number;
  showZoomButtons?: boolean;
}

const NO_BOUNDARIES: readonly number[] = [];

export function MapCanvas({
  title,
  data,
  rows,
  columns,
  hovered,
  onHover,
  mode = "matrix",
  showClaim = true,
  minWeight = 0.05,
  isCross = false,
  forwardFraction = 0.5,
  boundaries = NO_BOUNDARIES,
  maxHeight = 620,
  showZoomButtons = true,
}: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const viewer = useRef<MapViewer | null>(null);
  const palette = usePalette();
  const onHoverRef = useRef(onHover);
  onHoverRef.current = onHover;
  const options = useMemo<MapOptions>(
    () => ({
      data,
      rows,
      columns,
      mode,
      showClaim,
      palette,
      minWeight,
      isCross,
      forwardFraction,
      boundaries,
      maxHeight,
    }),
    [
      data,
      rows,
      columns,
      mode,
      showClaim,
      palette,
      minWeight,
      isCross,
      forwardFraction,
      boundaries,
      maxHeight,
    ],
  );
  useEffect(() => {
    const newViewer = new MapViewer(canvas.current!, options, (point) => onHoverRef.current(point));
    viewer.current = newViewer;
    return () => newViewer.dispose();
  }, []);
  useEffect(() => viewer.current!.update(options), [options]);
  useEffect(() => {
    viewer.current?.setHovered(hovered.get());
    return hovered.subscribe((point) => viewer.current?.setHovered(point));
  }, [hovered]);
  const zoom = (factor: number) => viewer.current!.zoom(factor, null);
  return (
    <div class="map">
      <div>
        <canvas
          ref={canvas}
          tabIndex={0}
          role="img"
          aria-label={`${title}: ${data.rows} rows, ${data.columns} columns`}
          aria-description="Plus and minus zoom, arrow keys pan, 0 fits the map to the view."
        />
      </div>
      {showZoomButtons && (
        <div class="zoom-buttons" role="group" aria-label={`Zoom of ${title}`}>
          <button type="button" class="icon" aria-label="Zoom in" onClick={() => zoom(1.6)}>
            +
          </button>
          <button type="button" class="icon" aria-label="Zoom out" onClick={() => zoom(1 / 1.6)}>
            −
          </button>
          <button type="button" class="icon" aria-label="Fit to view" onClick={() => viewer.current!.fit()}>
            ⤢
          </button>
        </div>
      )}
    </div>
  );
}
