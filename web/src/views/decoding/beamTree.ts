/** Beam search as a tree to draw: where each text stands after each step, and what became of it. */

import type { Beam, BeamNode } from "../../api.ts";

export interface Leaf {
  step: number;
  place: number; // in its step, the best first
  parent: number; // place in the step before, -1 for the root
  node: BeamNode;
  fate: "best" | "going" | "dropped";
  ended: number | null; // the final score of the text that ended here, NaN where it was not among the best
}

/** All texts up to and with a step. What was given up or has ended is told as far as that step knows. */
export function leaves(beam: Beam, last: number): Leaf[] {
  const until = Math.min(last, beam.steps.length - 1);
  const paths = pathsOf(beam);
  const finished = beam.finished.filter((text) => text.step <= until);
  const ends = new Map(finished.map((text) => [name(text.tokens.map(({ id }) => id)), text.score]));
  const drawn = new Set(paths.flat().map(name));
  const beyond = new Map([...ends].filter(([text]) => !drawn.has(text)));
  const over = until === beam.steps.length - 1;
  const best = over && beam.best !== null ? beam.best.tokens.map(({ id }) => id) : bestOf(beam, paths, until);
  const alive = new Set<string>();
  for (let step = until; step >= 0; step--) {
    beam.steps[step].forEach((node, place) => {
      if (step === until || ends.has(name(paths[step][place])) || alive.has(`${step},${place}`)) {
        alive.add(`${step},${place}`);
        if (node.parent >= 0) alive.add(`${step - 1},${node.parent}`);
      }
    });
  }
  return beam.steps.slice(0, until + 1).flatMap((nodes, step) =>
    nodes.map((node, place): Leaf => {
      const path = paths[step][place];
      const leads = path.every((id, n) => best[n] === id);
      const ended = ends.get(name(path)) ?? endedAfter(beyond, path) ?? (node.ended === true ? NaN : null);
      const lives = alive.has(`${step},${place}`) || ended !== null;
      return { step, place, parent: node.parent, node, fate: leads ? "best" : lives ? "going" : "dropped", ended };
    }),
  );
}

/** Where the end token is no node, the text that ended is one longer than its last node. */
function endedAfter(ends: Map<string, number>, path: number[]): number | null {
  for (const [text, score] of ends) {
    const ids = text === "" ? [] : text.split(",");
    if (ids.length === path.length + 1 && path.every((id, n) => ids[n] === String(id))) return score;
  }
  return null;
}

/** The tokens from the root to each node. */
export function pathsOf(beam: Beam): number[][][] {
  const out: number[][][] = [];
  beam.steps.forEach((nodes, step) => {
    out.push(
      nodes.map((node) => [...(node.parent < 0 || step === 0 ? [] : (out[step - 1][node.parent] ?? [])), node.token.id]),
    );
  });
  return out;
}

function bestOf(beam: Beam, paths: number[][][], step: number): number[] {
  const nodes = beam.steps[step] ?? [];
  let place = 0;
  nodes.forEach((node, n) => {
    if (node.total > nodes[place].total) place = n;
  });
  return paths[step]?.[place] ?? [];
}

function name(ids: number[]): string {
  return ids.join(",");
}
