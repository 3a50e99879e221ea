import assert from "node:assert/strict";
import { test } from "node:test";
import type { BeamAnswer } from "../src/api.ts";
import { downsample } from "../src/components/downsample.ts";
import { treeNodes } from "../src/views/decoding/beamTree.ts";
import { influenceLevel } from "../src/views/leaks/influence.ts";
import { parseLengths, segmentBoundaries } from "../src/views/masks/packing.ts";
import { runCharts } from "../src/views/training/useRun.ts";

const token = (id: number) => ({ id, text: `t${id}`, special: false });
const node = (id: number, parent: number, score: number) => ({
  id,
  parent,
  token: token(id),
  logprob: -1,
  score,
});
const BEAM: BeamAnswer = {
  steps: [
    [node(1, -1, -1), node(2, -1, -2)],
    [node(3, 0, -1.5), node(4, 0, -3)],
    [node(5, 1, -3.1), node(6, 1, -4)],
  ],
  finished: [{ tokens: [token(1), token(3), token(0)], score: -0.5, step: 2 }],
  best: { tokens: [token(1), token(3), token(0)], score: -0.5 },
};

test("a tree shows the best path, pruned nodes and finished hypotheses", () => {
  const statuses = Object.fromEntries(
    treeNodes(BEAM, 2).map(({ node, status, finalScore }) => [node.id, [status, finalScore]]),
  );
  assert.deepEqual(statuses, {
    1: ["best", null],
    2: ["pruned", null],
    3: ["best", -0.5],
    4: ["active", null],
    5: ["active", null],
    6: ["active", null],
  });
});

test("an EOS token with a node of its own is marked only there", () => {
  const beam: BeamAnswer = {
    ...BEAM,
    steps: [BEAM.steps[0], BEAM.steps[1], [{ ...node(0, 0, -1.6), finished: true }, node(5, 1, -3.1)]],
  };
  assert.deepEqual(
    treeNodes(beam, 2).map((node) => node.finalScore),
    [null, null, null, null, -0.5, null],
  );
});

test("an earlier step does not depend on later ones", () => {
  assert.deepEqual(
    treeNodes(BEAM, 0).map((node) => node.status),
    ["best", "active"],
  );
  assert.deepEqual(
    treeNodes(BEAM, 1).map((node) => node.finalScore),
    [null, null, null, null],
  );
});

test("packed sequences are separated where they start", () => {
  assert.deepEqual(parseLengths("6, 5 5;x"), [6, 5, 5]);
  assert.deepEqual(segmentBoundaries([6, 5, 5], 0, 16), [6, 11]);
  assert.deepEqual(segmentBoundaries([3, 4], 2, 16), [5, 9]);
  assert.deepEqual(segmentBoundaries([], 2, 16), []);
});

test("influence is drawn on a logarithmic scale", () => {
  assert.equal(influenceLevel(1, 1), 255);
  assert.equal(influenceLevel(0, 1), 0);
  assert.equal(influenceLevel(1e-9, 1), 0);
  assert.equal(influenceLevel(NaN, 1), 0);
  assert.ok(influenceLevel(1e-3, 1) > 120 && influenceLevel(1e-3, 1) < 135);
  assert.equal(influenceLevel(1, 0), 0);
});

test("downsampling keeps the ends and the peaks", () => {
  const points = Array.from({ length: 10_000 }, (_, n): [number, number] => [
    n,
    n === 5_000 ? 99 : Math.sin(n),
  ]);
  const kept = downsample(points, 400);
  assert.ok(kept.length <= 400);
  assert.deepEqual([kept[0], kept.at(-1)], [points[0], points.at(-1)]);
  assert.ok(kept.some(([, y]) => y === 99));
  assert.ok(kept.every(([x], n) => n === 0 || x > kept[n - 1][0]));
});

test("metrics become charts, missing ones do not", () => {
  const charts = runCharts([
    { step: 1, plain: 3, rate: 0.1 },
    { step: 2, plain: 2, measures: { loss: 2.5, bleu: 10 } },
  ]);
  assert.deepEqual(
    charts.map(({ title }) => title),
    ["Loss", "Learning rate", "Validation: bleu"],
  );
  assert.deepEqual(charts[0].series[1].points, [[2, 2.5]]);
});
