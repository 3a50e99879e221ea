/** Every head of an attention as a small picture with a number; a click shows it large. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Attended, Head, HeadSummary } from "../../api.ts";
import { pictures } from "../../map/tileImages.ts";
import type { Piece } from "../../map/tile.ts";
import { Choice, Notice, Switch } from "../../components/controls.tsx";
import { usePalette } from "../../shell/hooks.ts";
import { Refused, said } from "../../transport/transport.ts";
import { named } from "./panel.tsx";
import type { Reading } from "./attentionData.ts";

const SMALL = 64; // cells on the side of a small picture
const MANY = 160; // more heads than that are shown a layer at a time
const SIDE = 56; // pixels

export const MEASURES: [name: keyof HeadSummary, title: string, unit: string, meaning: string][] = [
  ["entropy", "entropy", "bits", "how spread out its reading is"],
  ["distance", "distance", "tokens", "how far away it reads"],
  ["first", "on the first token", "", "share of weight"],
  ["previous", "on the previous token", "", "share of weight"],
  ["itself", "on the token itself", "", "share of weight"],
  ["outside", "outside the claim", "", "largest weight that the mask forbids"],
];
const LEAK = 1e-4; // outside the claim, and more than rounding

interface Props {
  reading: Reading;
  attended: Attended;
  layer: number;
  head: Head;
  onChoose(layer: number, head: Head): void;
}

export function Heads({ reading, attended, layer, head, onChoose }: Props) {
  const [summary, setSummary] = useState<Record<number, HeadSummary[]>>({});
  const [error, setError] = useState("");
  const [measure, setMeasure] = useState<keyof HeadSummary>("entropy");
  const many = attended.layers * attended.heads > MANY;
  const [all, setAll] = useState(false);
  const grid = useRef<HTMLDivElement>(null);
  const layers = useMemo(
    () => Array.from({ length: attended.layers }, (_, n) => n).filter((n) => !many || all || n === layer),
    [attended, many, all, layer],
  );
  useEffect(() => setSummary({}), [reading, attended]);
  useEffect(() => {
    let here = true;
    const ask = async () => {
      await reading.begun;
      for (const n of [layer, ...layers.filter((other) => other !== layer)]) {
        if (!here) return;
        const found = await reading.summary(attended, n);
        if (here) setSummary((known) => ({ ...known, [n]: found }));
      }
    };
    setError("");
    if (reading.can("summary")) {
      ask().catch((wrong: unknown) => {
        if (here && !(wrong instanceof Refused && wrong.code === "unrecorded")) setError(said(wrong));
      });
    }
    return () => {
      here = false;
    };
  }, [reading, attended, layers, layer]);
  const heads: Head[] = useMemo(() => ["mean", ...Array.from({ length: attended.heads }, (_, n) => n)], [attended]);

  const step = (event: KeyboardEvent) => {
    const across = heads.length,
      moves: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across };
    const buttons = [...grid.current!.querySelectorAll<HTMLElement>("button")];
    const next = buttons[buttons.indexOf(document.activeElement as HTMLElement) + (moves[event.key] ?? NaN)];
    if (next === undefined) return;
    next.focus();
    event.preventDefault();
    event.stopPropagation();
  };
  const chosen = typeof head === "number" ? summary[layer]?.[head] : undefined;
  return (
    <section class="heads" aria-label="Heads">
      <div class="row">
        <h3>Heads</h3>
        <Choice
          label="Number"
          value={measure}
          onChange={(value) => setMeasure(value as keyof HeadSummary)}
          options={MEASURES.map(([name, title]) => [name, title])}
        />
        {many && <Switch label="All layers" on={all} onChange={setAll} />}
      </div>
      <Notice error={error} />
      {chosen !== undefined && <Numbers title={`Layer ${layer}, head ${head}`} numbers={chosen} />}
      <div class="scroll">
        <div ref={grid} class="grid" onKeyDown={step}>
          {layers.map((l) => (
            <div class="line" key={l} role="group" aria-label={`Layer ${l}`}>
              <span class="quiet side">{l}</span>
              {heads.map((h) => {
                const on = l === layer && h === head;
                const numbers = typeof h === "number" ? summary[l]?.[h] : undefined;
                return (
                  <button
                    type="button"
                    key={h}
                    class={on ? "thumb on" : "thumb"}
                    aria-pressed={on}
                    tabIndex={on || (l === layers[0] && h === "mean") ? 0 : -1}
                    aria-label={`Layer ${l}, ${named(h)}${numbers ? `, ${measure} ${short(numbers[measure])}` : ""}`}
                    onClick={() => onChoose(l, h)}
                  >
                    <Thumb reading={reading} attended={attended} layer={l} head={h} />
                    <span class="number">
                      {h === "mean" ? "mean" : numbers === undefined ? "·" : short(numbers[measure])}
                      {numbers !== undefined && numbers.outside > LEAK && (
                        <b class="alert" title="reads outside the claim">
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

function Numbers({ title, numbers }: { title: string; numbers: HeadSummary }) {
  return (
    <dl class="numbers" aria-label={title}>
      {MEASURES.map(([name, word, unit, meaning]) => (
        <div key={name} title={meaning}>
          <dt>{word}</dt>
          <dd class={name === "outside" && numbers.outside > LEAK ? "alert" : ""}>
            {short(numbers[name])}
            {unit && ` ${unit}`}
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** Asked for when it comes into view, and kept as long as the page shows this reading. */
function Thumb({ reading, attended, layer, head }: Omit<Props, "onChoose">) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const palette = usePalette();
  const [piece, setPiece] = useState<Piece | null>(null);
  useEffect(() => {
    let here = true;
    setPiece(null);
    const watch = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        watch.disconnect();
        reading.picture(attended, layer, head, SMALL).then(
          (made) => {
            if (here) setPiece(made);
          },
          () => undefined,
        ); // it stays empty
      },
      { rootMargin: "100px" },
    );
    watch.observe(canvas.current!);
    return () => {
      here = false;
      watch.disconnect();
    };
  }, [reading, attended, layer, head]);
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    context.clearRect(0, 0, canvas.current!.width, canvas.current!.height);
    if (piece === null) return;
    context.imageSmoothingEnabled = false;
    const longest = Math.max(piece.rows, piece.columns),
      size = canvas.current!.width;
    context.drawImage(pictures(piece, palette).weights, 0, 0, (size * piece.columns) / longest, (size * piece.rows) / longest);
  }, [piece, palette]);
  return <canvas ref={canvas} width={SIDE * 2} height={SIDE * 2} aria-hidden="true" />;
}

function short(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.01) return "< .01";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
