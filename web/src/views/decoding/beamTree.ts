/** The tree of a beam search, for drawing: the status of each hypothesis after a step. */

import type { BeamAnswer, BeamNode } from "../../api.ts";

export interface TreeNode {
  step: number;
  rank: number; // in its step, the best first
  parent: number; // rank in the previous step, -1 for the root
  node: BeamNode;
  status: "best" | "active" | "pruned";
  finalScore: number | null; // of the hypothesis that is finished here; NaN if it is not among the results
}

/** All nodes up to a step, with their status as of that step: later steps are not taken into account. */
export function treeNodes(beam: BeamAnswer, step: number): TreeNode[] {
  const lastStep = Math.min(step, beam.steps.length - 1);
  const paths = nodePaths(beam);
  const finished = beam.finished.filter((hypothesis) => hypothesis.step <= lastStep);
  const finalScores = new Map(
    finished.map(({ tokens, score }) => [pathKey(tokens.map(({ id }) => id)), score]),
  );
  const nodeKeys = new Set(paths.flat().map(pathKey));
  const scoresWithoutNode = new Map([...finalScores].filter(([key]) => !nodeKeys.has(key)));
  const isLastStep = lastStep === beam.steps.length - 1;
  const best =
    isLastStep && beam.best !== null
      ? beam.best.tokens.map(({ id }) => id)
      : bestPath(beam, paths, lastStep);
  const active = new Set<string>();
  for (let n = lastStep; n >= 0; n--) {
    beam.steps[n].forEach((node, rank) => {
      if (n === lastStep || finalScores.has(pathKey(paths[n][rank])) || active.has(`${n},${rank}`)) {
        active.add(`${n},${rank}`);
        if (node.parent >= 0) active.add(`${n - 1},${node.parent}`);
      }
    });
  }
  return beam.steps.slice(0, lastStep + 1).flatMap((nodes, nodeStep) =>
    nodes.map((node, rank): TreeNode => {
      const path = paths[nodeStep][rank];
      const isBest = path.every((id, n) => best[n] === id);
      const finalScore =
        finalScores.get(pathKey(path)) ??
        scoreAfterPath(scoresWithoutNode, path) ??
        (node.finished === true ? NaN : null);
      const isActive = active.has(`${nodeStep},${rank}`) || finalScore !== null;
      const status = isBest ? "best" : isActive ? "active" : "pruned";
      return { step: nodeStep, rank, parent: node.parent, node, status, finalScore };
    }),
  );
}

/** The score of a hypothesis that is finished by an EOS token without a node, one token after the path. */
function scoreAfterPath(finalScores: Map<string, number>, path: number[]): number | null {
  for (const [key, score] of finalScores) {
    const ids = key === "" ? [] : key.split(",");
    if (ids.length === path.length + 1 && path.every((id, n) => ids[n] === String(id))) return score;
  }
  return null;
}

/** The tokens from the root to each node, by step and rank. */
export function nodePaths(beam: BeamAnswer): number[][][] {
  const paths: number[][][] = [];
  beam.steps.forEach((nodes, step) => {
    const parentPath = (parent: number) =>
      parent < 0 || step === 0 ? [] : (paths[step - 1][parent] ?? []);
    paths.push(nodes.map((node) => [...parentPath(node.parent), node.token.id]));
  });
  return paths;
}

function bestPath(beam: BeamAnswer, paths: number[][][], step: number): number[] {
  const nodes = beam.steps[step] ?? [];
  let best = 0;
  nodes.forEach((node, n) => {
    if (node.score > nodes[best].score) best = n;
  });
  return paths[step]?.[best] ?? [];
}

function pathKey(ids: number[]): string {
  return ids.join(",");
}
