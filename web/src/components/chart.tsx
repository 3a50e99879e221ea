/** A line chart of several series over the same steps, told apart by dashes as well as colours. */

import { bisector, extent, max, min } from "d3-array";
import { scaleLinear, scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { downsample } from "./downsample.ts";

export interface Series {
  name: string;
  points: [x: number, y: number][];
}

/** A fixed x axis, for data that come as one looks. */
export interface XAxis {
  domain: [number, number];
  ticks: number[];
  format(value: number): string;
  maxGap: number; // a line is broken where two points are further apart
}

interface Props {
  title: string;
  series: Series[];
  yLabel: string;
  xLabel?: string;
  xAxis?: XAxis;
  logScale?: boolean;
  minTop?: number; // the y axis reaches at least so high
  height?: number;
}

const MARGIN = { top: 12, right: 22, bottom: 32, left: 52 };
const MAX_MARKED_POINTS = 24; // of a series whose points are marked
const pointBisector = bisector((point: [number, number]) => point[0]);

export function Chart(props: Props) {
  const { title, series, yLabel, xLabel = "step", xAxis, logScale = false, minTop, height = 220 } = props;
  const frame = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [hoverX, setHoverX] = useState<number | null>(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    observer.observe(frame.current!);
    return () => observer.disconnect();
  }, []);
  const finiteSeries = useMemo(
    () =>
      series
        .map(({ name, points }) => ({
          name,
          points: points.filter(([, value]) => Number.isFinite(value) && (!logScale || value > 0)),
        }))
        .filter(({ points }) => points.length > 0),
    [series, logScale],
  );
  const drawnSeries = useMemo(
    () => finiteSeries.map((item) => ({ ...item, points: downsample(item.points, 1200) })),
    [finiteSeries],
  );
  const allPoints = useMemo(() => finiteSeries.flatMap(({ points }) => points), [finiteSeries]);
  const low = min(allPoints, (point) => point[1]) ?? 0,
    high = Math.max(max(allPoints, (point) => point[1]) ?? 1, minTop ?? -Infinity);
  const isLogarithmic = logScale && allPoints.length > 0 && high > 5 * low;
  const scales = useMemo(() => {
    const [first = 0, last = 1] = xAxis?.domain ?? extent(allPoints, (point) => point[0]);
    const range: [number, number] = [height - MARGIN.bottom, MARGIN.top];
    return {
      x: scaleLinear(
        [first, last === first ? first + 1 : last],
        [MARGIN.left, Math.max(MARGIN.left + 10, width - MARGIN.right)],
      ),
      y: isLogarithmic
        ? scaleLog([low, high], range)
        : scaleLinear([Math.min(low, 0), high === low ? low + 1 : high], range).nice(),
    };
  }, [allPoints, low, high, isLogarithmic, width, height, xAxis]);
  const linePath = line<[number, number]>(
    ([a]) => scales.x(a),
    ([, b]) => scales.y(b),
  );
  const hoverPoints =
    hoverX === null
      ? []
      : finiteSeries.map(({ name, points }) => {
          const n = Math.max(0, Math.min(points.length - 1, pointBisector.center(points, hoverX)));
          return { name, point: points[n] };
        });
  const formatX = xAxis?.format ?? ((value: number) => value.toLocaleString("en"));
  const xTicks =
    xAxis?.ticks ?? scales.x.ticks(Math.max(2, Math.floor(width / 110))).filter(Number.isInteger);
  const ticks = isLogarithmic ? roundTicks(scales.y.ticks()) : scales.y.ticks(4);
  return (
    <figure class="chart">
      <figcaption>
        <span>{title}</span>
        {finiteSeries.map(({ name }, n) => {
          const hoverPoint = hoverPoints.find((item) => item.name === name);
          return (
            <span class={`entry s${n % 4}`} key={name}>
              <svg width="24" height="8" aria-hidden="true">
                <line x1="0" x2="24" y1="4" y2="4" />
              </svg>
              {name}
              {hoverPoint ? ` ${formatNumber(hoverPoint.point[1])}` : ""}
            </span>
          );
        })}
        {hoverPoints.length > 0 && (
          <span class="muted">
            {xLabel} {formatX(hoverPoints[0].point[0])}
          </span>
        )}
      </figcaption>
      <div ref={frame} class="frame">
        {width > 0 && finiteSeries.length > 0 && (
          <svg
            width={width}
            height={height}
            role="img"
            aria-label={`${title}: ${finiteSeries.map(describeSeries).join("; ")}`}
            onPointerMove={(event) => setHoverX(scales.x.invert(event.offsetX))}
            onPointerLeave={() => setHoverX(null)}
          >
            {ticks.map((value) => (
              <g key={value} transform={`translate(0 ${scales.y(value)})`}>
                <line class="grid-line" x1={MARGIN.left} x2={width - MARGIN.right} />
                <text class="tick" x={MARGIN.left - 8} dy="0.32em" text-anchor="end">
                  {formatNumber(value)}
                </text>
              </g>
            ))}
            {xTicks.map((value) => (
              <text
                key={value}
                class="tick"
                x={scales.x(value)}
                y={height - MARGIN.bottom + 16}
                text-anchor="middle"
              >
                {formatX(value)}
              </text>
            ))}
            <text class="tick" x={width - MARGIN.right} y={height - 3} text-anchor="end">
              {xLabel}
            </text>
            <text class="tick" x={MARGIN.left} y={height - 3}>
              {yLabel}
            </text>
            {drawnSeries.map(({ name, points }, n) => (
              <path
                key={name}
                class={`curve s${n % 4}`}
                d={splitAtGaps(points, xAxis?.maxGap ?? Infinity)
                  .map((piece) => linePath(piece))
                  .join("")}
              />
            ))}
            {drawnSeries.map(
              ({ name, points }, n) =>
                points.length <= MAX_MARKED_POINTS &&
                points.map((point) => (
                  <circle
                    key={`${name} ${point[0]}`}
                    class={`dot s${n % 4}`}
                    cx={scales.x(point[0])}
                    cy={scales.y(point[1])}
                    r={2.5}
                  />
                )),
            )}
            {hoverPoints.map(({ name, point }, n) => (
              <circle
                key={name}
                class={`dot s${n % 4}`}
                cx={scales.x(point[0])}
                cy={scales.y(point[1])}
                r={3.5}
              />
            ))}
          </svg>
        )}
      </div>
    </figure>
  );
}

/** The points in pieces, each without a gap in x that is larger than `maxGap`. */
export function splitAtGaps(points: [number, number][], maxGap: number): [number, number][][] {
  const pieces: [number, number][][] = [];
  points.forEach((point, n) => {
    if (n === 0 || point[0] - points[n - 1][0] > maxGap) pieces.push([]);
    pieces[pieces.length - 1].push(point);
  });
  return pieces;
}

/** The ticks 1, 2, 5, 10, 20, …; only powers of ten if those are too many. */
function roundTicks(ticks: number[]): number[] {
  const withLeadingDigits = (digits: number[]) =>
    ticks.filter((value) => digits.includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9))));
  return withLeadingDigits([1, 2, 5]).length <= 7 ? withLeadingDigits([1, 2, 5]) : withLeadingDigits([1]);
}

function describeSeries({ name, points }: Series): string {
  return `${name} from ${formatNumber(points[0][1])} to ${formatNumber(points[points.length - 1][1])}`;
}

function formatNumber(value: number): string {
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  if (magnitude >= 10_000) {
    return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  }
  if (magnitude >= 100) return value.toFixed(0);
  if (magnitude >= 0.01) return String(Number(value.toPrecision(3)));
  return Number(value.toPrecision(2)).toExponential().replace("e-", "e−");
}
