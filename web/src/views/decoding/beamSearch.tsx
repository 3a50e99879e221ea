/** Beam search, as a tree that grows step by step. */

import { linkHorizontal } from "d3-shape";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { BeamAnswer, Texts } from "../../api.ts";
import { NumberField, Slider, Status, Switch } from "../../components/controls.tsx";
import { displayLabel, joinTokens } from "../../graphemes.ts";
import { useQuery } from "../../shell/hooks.ts";
import { type TreeNode, treeNodes } from "./beamTree.ts";

// pixels
const COLUMN_WIDTH = 104;
const ROW_HEIGHT = 42;
const BOX_WIDTH = 84;
const BOX_HEIGHT = 34;
const MARGIN_LEFT = 14;
const MARGIN_TOP = 8;
const STEP_MS = 600; // while it plays

export function BeamSearch({ texts }: { texts: Texts }) {
  const [params, setParams] = useState({
    num_beams: 4,
    max_new_tokens: 24,
    length_penalty: 1,
    early_stopping: false,
  });
  const { answer, error, isLoading } = useQuery("beam", { ...texts, ...params });
  const change = (changes: Partial<typeof params>) => setParams({ ...params, ...changes });
  return (
    <section class="beam" aria-label="Beam search">
      <div class="bar">
        <NumberField
          label="Beams"
          value={params.num_beams}
          min={1}
          max={16}
          onChange={(num_beams) => change({ num_beams })}
        />
        <NumberField
          label="Max new tokens"
          value={params.max_new_tokens}
          min={1}
          max={64}
          onChange={(max_new_tokens) => change({ max_new_tokens })}
        />
        <Slider
          label="length penalty"
          value={params.length_penalty}
          min={0}
          max={2}
          step={0.1}
          valueText={params.length_penalty.toFixed(1)}
          onChange={(length_penalty) => change({ length_penalty })}
        />
        <Switch
          label="Early stopping"
          checked={params.early_stopping}
          onChange={(early_stopping) => change({ early_stopping })}
        />
      </div>
      <Status error={error} isLoading={isLoading && answer === null}>
        Searching …
      </Status>
      {answer !== null && answer.steps.length > 0 && <BeamPlayer beam={answer} />}
    </section>
  );
}

function BeamPlayer({ beam }: { beam: BeamAnswer }) {
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
    const timer = window.setTimeout(() => setStep(step + 1), STEP_MS);
    return () => window.clearTimeout(timer);
  }, [playing, step, last]);
  const finished = beam.finished
    .filter((hypothesis) => hypothesis.step <= step)
    .sort((a, b) => b.score - a.score);
  const goTo = (target: number) => {
    setPlaying(false);
    setStep(Math.max(0, Math.min(last, target)));
  };
  return (
    <>
      <div class="bar player" role="group" aria-label="Search steps">
        <button
          type="button"
          class="icon"
          aria-label="Previous step"
          disabled={step === 0}
          onClick={() => goTo(step - 1)}
        >
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
        <button
          type="button"
          class="icon"
          aria-label="Next step"
          disabled={step === last}
          onClick={() => goTo(step + 1)}
        >
          ›
        </button>
        <Slider
          label="step"
          value={step}
          min={0}
          max={last}
          step={1}
          valueText={`${step + 1} of ${last + 1}`}
          onChange={goTo}
        />
      </div>
      <BeamTree beam={beam} step={step} />
      <p class="muted">
        Thick: path to the best hypothesis. Dashed: pruned. Double frame: finished hypothesis. Number: total
        log-probability.
      </p>
      {finished.length > 0 && (
        <ol class="finished" aria-label="Finished hypotheses">
          {finished.map((hypothesis, n) => (
            <li key={n}>
              <span dir="auto">{joinTokens(hypothesis.tokens)}</span>
              <span class="muted">
                {" "}
                {hypothesis.score.toFixed(3)}, at step {hypothesis.step + 1}
              </span>
            </li>
          ))}
        </ol>
      )}
    </>
  );
}

const link = linkHorizontal<unknown, [number, number]>();

function BeamTree({ beam, step }: { beam: BeamAnswer; step: number }) {
  const nodes = useMemo(() => treeNodes(beam, step), [beam, step]);
  const scroll = useRef<HTMLDivElement>(null);
  const rows = Math.max(...beam.steps.map((nodes) => nodes.length));
  const width = MARGIN_LEFT * 2 + 20 + (step + 1) * COLUMN_WIDTH,
    height = MARGIN_TOP * 2 + rows * ROW_HEIGHT;
  useEffect(() => {
    scroll.current!.scrollLeft = scroll.current!.scrollWidth;
  }, [step, width]);
  const position = (nodeStep: number, rank: number): [number, number] => [
    MARGIN_LEFT + 20 + nodeStep * COLUMN_WIDTH,
    MARGIN_TOP + rank * ROW_HEIGHT,
  ];
  const root: [number, number] = [MARGIN_LEFT + 6, MARGIN_TOP + BOX_HEIGHT / 2];
  return (
    <div
      ref={scroll}
      class="scroll tree"
      tabIndex={0}
      role="group"
      aria-label={`Beam search tree after step ${step + 1}`}
    >
      <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`}>
        <circle cx={root[0]} cy={root[1]} r={4} class="root" />
        {nodes.map((node) => {
          const [x, y] = position(node.step, node.rank);
          const [parentX, parentY] = position(node.step - 1, node.parent);
          const start: [number, number] =
            node.parent < 0 ? root : [parentX + BOX_WIDTH, parentY + BOX_HEIGHT / 2];
          return (
            <path
              key={`l${node.step},${node.rank}`}
              class={`link ${node.status}`}
              d={link({ source: start, target: [x, y + BOX_HEIGHT / 2] }) ?? ""}
            />
          );
        })}
        {nodes.map((node) => {
          const [x, y] = position(node.step, node.rank),
            text = displayLabel(node.node.token.text);
          return (
            <g
              key={`n${node.step},${node.rank}`}
              class={`node ${node.status}`}
              transform={`translate(${x} ${y})`}
            >
              <title>{nodeTitle(node, text)}</title>
              <rect width={BOX_WIDTH} height={BOX_HEIGHT} rx={5} />
              {node.finalScore !== null && (
                <rect class="inner" x={3} y={3} width={BOX_WIDTH - 6} height={BOX_HEIGHT - 6} rx={3} />
              )}
              <text x={BOX_WIDTH / 2} y={15}>
                {truncate(text)}
              </text>
              <text x={BOX_WIDTH / 2} y={28} class="score">
                {node.node.score.toFixed(2)}
              </text>
            </g>
          );
        })}
      </svg>
    </div>
  );
}

function nodeTitle({ node, finalScore }: TreeNode, text: string): string {
  const score = finalScore === null || Number.isNaN(finalScore) ? "" : ` with score ${finalScore.toFixed(3)}`;
  const ending = finalScore === null ? "" : `, finished${score}`;
  return `${text}: log-probability ${node.logprob.toFixed(3)}, total ${node.score.toFixed(3)}${ending}`;
}

function truncate(text: string): string {
  const characters = [...text];
  return characters.length > 11 ? `${characters.slice(0, 10).join("")}…` : text;
}
