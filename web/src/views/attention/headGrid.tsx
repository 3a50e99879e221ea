/** A thumbnail of every head with a statistic; a click selects the head. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { AttentionInfo, Head, HeadStats } from "../../api.ts";
import { Select, Status, Switch } from "../../components/controls.tsx";
import type { Tile } from "../../map/tile.ts";
import { tileImages } from "../../map/tileImages.ts";
import { usePalette } from "../../shell/hooks.ts";
import { ApiError, errorMessage } from "../../transport/transport.ts";
import type { AttentionData } from "./attentionData.ts";
import { headTitle } from "./panel.tsx";

const THUMBNAIL_CELLS = 64; // along each side
const MAX_HEADS_SHOWN = 160; // of more heads one layer is shown at a time
const THUMBNAIL_PIXELS = 56;

export const HEAD_STATS: [name: keyof HeadStats, title: string, unit: string, meaning: string][] = [
  ["entropy", "entropy", "bits", "how spread out the attention is"],
  ["distance", "distance", "tokens", "mean distance to the attended token"],
  ["first", "on first token", "", "mean weight"],
  ["previous", "on previous token", "", "mean weight"],
  ["itself", "on itself", "", "mean weight"],
  ["outside", "outside the claim", "", "largest weight that the mask forbids"],
];
const LEAK_THRESHOLD = 1e-4; // larger weights outside the claim are no rounding errors

interface Props {
  data: AttentionData;
  attention: AttentionInfo;
  layer: number;
  head: Head;
  onSelect(layer: number, head: Head): void;
}

export function HeadGrid({ data, attention, layer, head, onSelect }: Props) {
  const [stats, setStats] = useState<Record<number, HeadStats[]>>({});
  const [error, setError] = useState("");
  const [stat, setStat] = useState<keyof HeadStats>("entropy");
  const hasManyHeads = attention.layers * attention.heads > MAX_HEADS_SHOWN;
  const [showAll, setShowAll] = useState(false);
  const grid = useRef<HTMLDivElement>(null);
  const layers = useMemo(
    () =>
      Array.from({ length: attention.layers }, (_, n) => n).filter(
        (n) => !hasManyHeads || showAll || n === layer,
      ),
    [attention, hasManyHeads, showAll, layer],
  );
  useEffect(() => setStats({}), [data, attention]);
  useEffect(() => {
    let isActive = true;
    const loadStats = async () => {
      await data.firstMapLoaded;
      for (const n of [layer, ...layers.filter((other) => other !== layer)]) {
        if (!isActive) return;
        const layerStats = await data.headStats(attention, n);
        if (isActive) setStats((previous) => ({ ...previous, [n]: layerStats }));
      }
    };
    setError("");
    if (data.supports("head_stats")) {
      loadStats().catch((reason: unknown) => {
        const isMissing = reason instanceof ApiError && reason.code === "not_in_snapshot";
        if (isActive && !isMissing) setError(errorMessage(reason));
      });
    }
    return () => {
      isActive = false;
    };
  }, [data, attention, layers, layer]);
  const heads: Head[] = useMemo(
    () => ["mean", ...Array.from({ length: attention.heads }, (_, n) => n)],
    [attention],
  );

  const onKeyDown = (event: KeyboardEvent) => {
    const columns = heads.length,
      moves: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const buttons = [...grid.current!.querySelectorAll<HTMLElement>("button")];
    const next = buttons[buttons.indexOf(document.activeElement as HTMLElement) + (moves[event.key] ?? NaN)];
    if (next === undefined) return;
    next.focus();
    event.preventDefault();
    event.stopPropagation();
  };
  const selectedStats = typeof head === "number" ? stats[layer]?.[head] : undefined;
  return (
    <section class="heads" aria-label="Heads">
      <div class="row">
        <h3>Heads</h3>
        <Select
          label="Statistic"
          value={stat}
          onChange={(value) => setStat(value as keyof HeadStats)}
          options={HEAD_STATS.map(([name, title]) => [name, title])}
        />
        {hasManyHeads && <Switch label="All layers" checked={showAll} onChange={setShowAll} />}
      </div>
      <Status error={error} />
      {selectedStats !== undefined && (
        <HeadStatsList title={`Layer ${layer}, head ${head}`} stats={selectedStats} />
      )}
      <div class="scroll">
        <div ref={grid} class="grid" onKeyDown={onKeyDown}>
          {layers.map((l) => (
            <div class="layer-row" key={l} role="group" aria-label={`Layer ${l}`}>
              <span class="muted layer-index">{l}</span>
              {heads.map((h) => {
                const isSelected = l === layer && h === head;
                const headStats = typeof h === "number" ? stats[l]?.[h] : undefined;
                const statLabel = headStats ? `, ${stat} ${formatStat(headStats[stat])}` : "";
                return (
                  <button
                    type="button"
                    key={h}
                    class={isSelected ? "thumbnail selected" : "thumbnail"}
                    aria-pressed={isSelected}
                    tabIndex={isSelected || (l === layers[0] && h === "mean") ? 0 : -1}
                    aria-label={`Layer ${l}, ${headTitle(h)}${statLabel}`}
                    onClick={() => onSelect(l, h)}
                  >
                    <Thumbnail data={data} attention={attention} layer={l} head={h} />
                    <span class="stat">
                      {h === "mean" ? "mean" : headStats === undefined ? "·" : formatStat(headStats[stat])}
                      {headStats !== undefined && headStats.outside > LEAK_THRESHOLD && (
                        <b class="alert" title="attends outside the claim">
                          {" "}
                          ☒
                        </b>
                      )}
                    </span>
                  </button>
                );
              })}
            </div>
          ))}
        </div>
      </div>
    </section>
  );
}

function HeadStatsList({ title, stats }: { title: string; stats: HeadStats }) {
  return (
    <dl class="head-stats" aria-label={title}>
      {HEAD_STATS.map(([name, statTitle, unit, meaning]) => (
        <div key={name} title={meaning}>
          <dt>{statTitle}</dt>
          <dd class={name === "outside" && stats.outside > LEAK_THRESHOLD ? "alert" : ""}>
            {formatStat(stats[name])}
            {unit && ` ${unit}`}
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** A thumbnail that is loaded when it comes into view. */
function Thumbnail({ data, attention, layer, head }: Omit<Props, "onSelect">) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const palette = usePalette();
  const [tile, setTile] = useState<Tile | null>(null);
  useEffect(() => {
    let isActive = true;
    setTile(null);
    const observer = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        observer.disconnect();
        data.thumbnail(attention, layer, head, THUMBNAIL_CELLS).then(
          (thumbnail) => {
            if (isActive) setTile(thumbnail);
          },
          () => undefined,
        ); // on errors it stays empty
      },
      { rootMargin: "100px" },
    );
    observer.observe(canvas.current!);
    return () => {
      isActive = false;
      observer.disconnect();
    };
  }, [data, attention, layer, head]);
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    context.clearRect(0, 0, canvas.current!.width, canvas.current!.height);
    if (tile === null) return;
    context.imageSmoothingEnabled = false;
    const maxCells = Math.max(tile.rows, tile.columns),
      size = canvas.current!.width;
    const width = (size * tile.columns) / maxCells,
      height = (size * tile.rows) / maxCells;
    context.drawImage(tileImages(tile, palette).weights, 0, 0, width, height);
  }, [tile, palette]);
  const canvasSize = THUMBNAIL_PIXELS * 2; // for high-resolution screens
  return <canvas ref={canvas} width={canvasSize} height={canvasSize} aria-hidden="true" />;
}

function formatStat(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.01) return "< .01";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
