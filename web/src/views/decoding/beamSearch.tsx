/** Beam search, step by step: several texts side by side, of which the best go on. */

import { linkHorizontal } from "d3-shape";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Beam, Texts } from "../../api.ts";
import { label, together } from "../../graphemes.ts";
import { Notice, NumberField, Slider, Switch } from "../../components/controls.tsx";
import { useAnswer } from "../../shell/hooks.ts";
import { type Leaf, leaves } from "./beamTree.ts";

const WIDE = 104,
  TALL = 42,
  BOX = 84,
  HIGH = 34,
  LEFT = 14,
  TOP = 8; // pixels: a column, a row, a box, the edges
const PACE = 600; // milliseconds a step

export function BeamSearch({ texts }: { texts: Texts }) {
  const [wish, setWish] = useState({ width: 4, limit: 24, length_penalty: 1, early_stopping: false });
  const { answer, error, busy } = useAnswer("beam", { ...texts, ...wish });
  const change = (part: Partial<typeof wish>) => setWish({ ...wish, ...part });
  return (
    <section class="beam" aria-label="Beam search">
      <div class="bar">
        <NumberField label="Beams" value={wish.width} least={1} most={16} onChange={(width) => change({ width })} />
        <NumberField label="Most tokens" value={wish.limit} least={1} most={64} onChange={(limit) => change({ limit })} />
        <Slider
          label="length penalty"
          value={wish.length_penalty}
          least={0}
          most={2}
          step={0.1}
          shown={wish.length_penalty.toFixed(1)}
          onChange={(length_penalty) => change({ length_penalty })}
        />
        <Switch label="Stop early" on={wish.early_stopping} onChange={(early_stopping) => change({ early_stopping })} />
      </div>
      <Notice error={error} busy={busy && answer === null}>
        Searching …
      </Notice>
      {answer !== null && answer.steps.length > 0 && <Growing beam={answer} />}
    </section>
  );
}

function Growing({ beam }: { beam: Beam }) {
  const last = beam.steps.length - 1;
  const [step, setStep] = useState(0);
  const [playing, setPlaying] = useState(false);
  useEffect(() => {
    setStep(0);
    setPlaying(false);
  }, [beam]);
  useEffect(() => {
    if (!playing) return;
    if (step >= last) return setPlaying(false);
    const wait = window.setTimeout(() => setStep(step + 1), PACE);
    return () => window.clearTimeout(wait);
  }, [playing, step, last]);
  const ended = beam.finished.filter((text) => text.step <= step).sort((a, b) => b.score - a.score);
  const go = (to: number) => {
    setPlaying(false);
    setStep(Math.max(0, Math.min(last, to)));
  };
  return (
    <>
      <div class="bar player" role="group" aria-label="Steps of the search">
        <button type="button" class="icon" aria-label="One step back" disabled={step === 0} onClick={() => go(step - 1)}>
          ‹
        </button>
        <button
          type="button"
          aria-label={playing ? "Pause" : "Play"}
          onClick={() => {
            if (step >= last) setStep(0);
            setPlaying(!playing);
          }}
        >
          {playing ? "Pause" : "Play"}
        </button>
        <button type="button" class="icon" aria-label="One step on" disabled={step === last} onClick={() => go(step + 1)}>
          ›
        </button>
        <Slider label="step" value={step} least={0} most={last} step={1} shown={`${step + 1} of ${last + 1}`} onChange={go} />
      </div>
      <Tree beam={beam} step={step} />
      <p class="quiet">
        Thick: leads to the best text. Dashed: given up. Double frame: a text ended here. The number is the log-probability so
        far.
      </p>
      {ended.length > 0 && (
        <ol class="ended" aria-label="Texts that have ended">
          {ended.map((text, n) => (
            <li key={n}>
              <span dir="auto">{together(text.tokens)}</span>
              <span class="quiet">
                {" "}
                {text.score.toFixed(3)}, at step {text.step + 1}
              </span>
            </li>
          ))}
        </ol>
      )}
    </>
  );
}

const link = linkHorizontal<unknown, [number, number]>();

function Tree({ beam, step }: { beam: Beam; step: number }) {
  const all = useMemo(() => leaves(beam, step), [beam, step]);
  const scroll = useRef<HTMLDivElement>(null);
  const rows = Math.max(...beam.steps.map((nodes) => nodes.length));
  const width = LEFT * 2 + 20 + (step + 1) * WIDE,
    height = TOP * 2 + rows * TALL;
  useEffect(() => {
    scroll.current!.scrollLeft = scroll.current!.scrollWidth;
  }, [step, width]);
  const at = (leaf: Pick<Leaf, "step" | "place">): [number, number] => [LEFT + 20 + leaf.step * WIDE, TOP + leaf.place * TALL];
  const root: [number, number] = [LEFT + 6, TOP + HIGH / 2];
  return (
    <div ref={scroll} class="scroll tree" tabIndex={0} role="group" aria-label={`Tree of the search after step ${step + 1}`}>
      <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`}>
        <circle cx={root[0]} cy={root[1]} r={4} class="root" />
        {all.map((leaf) => {
          const [x, y] = at(leaf);
          const from = leaf.parent < 0 ? root : at({ step: leaf.step - 1, place: leaf.parent });
          const start: [number, number] = leaf.parent < 0 ? root : [from[0] + BOX, from[1] + HIGH / 2];
          return (
            <path
              key={`l${leaf.step},${leaf.place}`}
              class={`link ${leaf.fate}`}
              d={link({ source: start, target: [x, y + HIGH / 2] }) ?? ""}
            />
          );
        })}
        {all.map((leaf) => {
          const [x, y] = at(leaf),
            text = label(leaf.node.token.text);
          return (
            <g key={`n${leaf.step},${leaf.place}`} class={`node ${leaf.fate}`} transform={`translate(${x} ${y})`}>
              <title>{told(leaf, text)}</title>
              <rect width={BOX} height={HIGH} rx={5} />
              {leaf.ended !== null && <rect class="inner" x={3} y={3} width={BOX - 6} height={HIGH - 6} rx={3} />}
              <text x={BOX / 2} y={15}>
                {short(text)}
              </text>
              <text x={BOX / 2} y={28} class="score">
                {leaf.node.total.toFixed(2)}
              </text>
            </g>
          );
        })}
      </svg>
    </div>
  );
}

function told({ node, ended }: Leaf, text: string): string {
  const end = ended === null ? "" : Number.isNaN(ended) ? ", ended" : `, ended with ${ended.toFixed(3)}`;
  return `${text}: ${node.score.toFixed(3)}, together ${node.total.toFixed(3)}${end}`;
}

function short(text: string): string {
  const letters = [...text];
  return letters.length > 11 ? `${letters.slice(0, 10).join("")}…` : text;
}
