/** Curves: several series over the same steps, told apart by dashes as well as colours. */

import { bisector, extent, max, min } from "d3-array";
import { scaleLinear, scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { thinned } from "./downsample.ts";

export interface Series {
  name: string;
  points: [x: number, y: number][];
}

interface Props {
  title: string;
  series: Series[];
  y: string;
  x?: string;
  log?: boolean;
  height?: number;
}

const MARGIN = { top: 12, right: 22, bottom: 32, left: 52 };
const FEW = 24; // points that are marked one by one
const near = bisector((point: [number, number]) => point[0]);

export function Chart({ title, series, y, x = "step", log = false, height = 220 }: Props) {
  const frame = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState<number | null>(null);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    watch.observe(frame.current!);
    return () => watch.disconnect();
  }, []);
  const known = useMemo(
    () =>
      series
        .map(({ name, points }) => ({
          name,
          points: points.filter(([, value]) => Number.isFinite(value) && (!log || value > 0)),
        }))
        .filter(({ points }) => points.length > 0),
    [series, log],
  );
  const drawn = useMemo(() => known.map((one) => ({ ...one, points: thinned(one.points, 1200) })), [known]);
  const all = useMemo(() => known.flatMap(({ points }) => points), [known]);
  const logarithmic = log && (max(all, (point) => point[1]) ?? 1) > 5 * (min(all, (point) => point[1]) ?? 1);
  const scales = useMemo(() => {
    const [first = 0, last = 1] = extent(all, (point) => point[0]);
    const low = min(all, (point) => point[1]) ?? 0,
      high = max(all, (point) => point[1]) ?? 1;
    const range: [number, number] = [height - MARGIN.bottom, MARGIN.top];
    return {
      x: scaleLinear(
        [first, last === first ? first + 1 : last],
        [MARGIN.left, Math.max(MARGIN.left + 10, width - MARGIN.right)],
      ),
      y: logarithmic
        ? scaleLog([low, high], range)
        : scaleLinear([Math.min(low, 0), high === low ? low + 1 : high], range).nice(),
    };
  }, [all, logarithmic, width, height]);
  const path = line<[number, number]>(
    ([a]) => scales.x(a),
    ([, b]) => scales.y(b),
  );
  const shown =
    at === null
      ? []
      : known.map(({ name, points }) => {
          const n = Math.max(0, Math.min(points.length - 1, near.center(points, at)));
          return { name, point: points[n] };
        });
  const ticks = logarithmic ? round(scales.y.ticks()) : scales.y.ticks(4);
  return (
    <figure class="chart">
      <figcaption>
        <span>{title}</span>
        {known.map(({ name }, n) => {
          const here = shown.find((one) => one.name === name);
          return (
            <span class={`entry s${n % 4}`} key={name}>
              <svg width="24" height="8" aria-hidden="true">
                <line x1="0" x2="24" y1="4" y2="4" />
              </svg>
              {name}
              {here ? ` ${number(here.point[1])}` : ""}
            </span>
          );
        })}
        {shown.length > 0 && (
          <span class="quiet">
            {x} {shown[0].point[0].toLocaleString("en")}
          </span>
        )}
      </figcaption>
      <div ref={frame} class="frame">
        {width > 0 && known.length > 0 && (
          <svg
            width={width}
            height={height}
            role="img"
            aria-label={`${title}: ${known.map(spoken).join("; ")}`}
            onPointerMove={(event) => setAt(scales.x.invert(event.offsetX))}
            onPointerLeave={() => setAt(null)}
          >
            {ticks.map((value) => (
              <g key={value} transform={`translate(0 ${scales.y(value)})`}>
                <line class="rule" x1={MARGIN.left} x2={width - MARGIN.right} />
                <text class="tick" x={MARGIN.left - 8} dy="0.32em" text-anchor="end">
                  {number(value)}
                </text>
              </g>
            ))}
            {scales.x
              .ticks(Math.max(2, Math.floor(width / 110)))
              .filter(Number.isInteger)
              .map((value) => (
                <text key={value} class="tick" x={scales.x(value)} y={height - MARGIN.bottom + 16} text-anchor="middle">
                  {value.toLocaleString("en")}
                </text>
              ))}
            <text class="tick" x={width - MARGIN.right} y={height - 3} text-anchor="end">
              {x}
            </text>
            <text class="tick" x={MARGIN.left} y={height - 3}>
              {y}
            </text>
            {drawn.map(({ name, points }, n) => (
              <path key={name} class={`curve s${n % 4}`} d={path(points) ?? ""} />
            ))}
            {drawn.map(
              ({ name, points }, n) =>
                points.length <= FEW &&
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
            {shown.map(({ name, point }, n) => (
              <circle key={name} class={`dot s${n % 4}`} cx={scales.x(point[0])} cy={scales.y(point[1])} r={3.5} />
            ))}
          </svg>
        )}
      </div>
    </figure>
  );
}

/** 1, 2, 5, 10, 20, …; powers of ten alone where that is too many. */
function round(ticks: number[]): number[] {
  const of = (leads: number[]) =>
    ticks.filter((value) => leads.includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9))));
  return of([1, 2, 5]).length <= 7 ? of([1, 2, 5]) : of([1]);
}

function spoken({ name, points }: Series): string {
  return `${name} from ${number(points[0][1])} to ${number(points[points.length - 1][1])}`;
}

function number(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10_000) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.01) return String(Number(value.toPrecision(3)));
  return Number(value.toPrecision(2)).toExponential().replace("e-", "e−");
}
