import assert from "node:assert/strict";
import { test } from "node:test";
import type { Beam } from "../src/api.ts";
import { thinned } from "../src/components/downsample.ts";
import { leaves } from "../src/views/decoding/beamTree.ts";
import { level } from "../src/views/leaks/influence.ts";
import { cuts, lengths } from "../src/views/masks/packing.ts";
import { curves } from "../src/views/training/useRun.ts";

const token = (id: number) => ({ id, text: `t${id}`, special: false });
const node = (id: number, parent: number, total: number) => ({ id, parent, token: token(id), score: -1, total });
const BEAM: Beam = {
  steps: [
    [node(1, -1, -1), node(2, -1, -2)],
    [node(3, 0, -1.5), node(4, 0, -3)],
    [node(5, 1, -3.1), node(6, 1, -4)],
  ],
  finished: [{ tokens: [token(1), token(3), token(0)], score: -0.5, step: 2 }],
  best: { tokens: [token(1), token(3), token(0)], score: -0.5 },
};

test("a tree tells what led to the best, what was given up and where a text ended", () => {
  const fates = Object.fromEntries(leaves(BEAM, 2).map((leaf) => [leaf.node.id, [leaf.fate, leaf.ended]]));
  assert.deepEqual(fates, {
    1: ["best", null],
    2: ["dropped", null],
    3: ["best", -0.5],
    4: ["going", null],
    5: ["going", null],
    6: ["going", null],
  });
});

test("an end that is a node of its own is marked there alone", () => {
  const beam: Beam = {
    ...BEAM,
    steps: [BEAM.steps[0], BEAM.steps[1], [{ ...node(0, 0, -1.6), ended: true }, node(5, 1, -3.1)]],
  };
  assert.deepEqual(
    leaves(beam, 2).map((leaf) => leaf.ended),
    [null, null, null, null, -0.5, null],
  );
});

test("an earlier step knows nothing of later ones", () => {
  assert.deepEqual(
    leaves(BEAM, 0).map((leaf) => leaf.fate),
    ["best", "going"],
  );
  assert.deepEqual(
    leaves(BEAM, 1).map((leaf) => leaf.ended),
    [null, null, null, null],
  );
});

test("packed texts are cut where they begin", () => {
  assert.deepEqual(lengths("6, 5 5;x"), [6, 5, 5]);
  assert.deepEqual(cuts([6, 5, 5], 0, 16), [6, 11]);
  assert.deepEqual(cuts([3, 4], 2, 16), [5, 9]);
  assert.deepEqual(cuts([], 2, 16), []);
});

test("influence is drawn by its order of magnitude", () => {
  assert.equal(level(1, 1), 255);
  assert.equal(level(0, 1), 0);
  assert.equal(level(1e-9, 1), 0);
  assert.equal(level(NaN, 1), 0);
  assert.ok(level(1e-3, 1) > 120 && level(1e-3, 1) < 135);
  assert.equal(level(1, 0), 0);
});

test("fewer points keep the ends and the peaks", () => {
  const points = Array.from({ length: 10_000 }, (_, n): [number, number] => [n, n === 5_000 ? 99 : Math.sin(n)]);
  const few = thinned(points, 400);
  assert.ok(few.length <= 400);
  assert.deepEqual([few[0], few.at(-1)], [points[0], points.at(-1)]);
  assert.ok(few.some(([, y]) => y === 99));
  assert.ok(few.every(([x], n) => n === 0 || x > few[n - 1][0]));
});

test("lines become curves, and numbers that are not there none", () => {
  const found = curves([
    { step: 1, plain: 3, rate: 0.1 },
    { step: 2, plain: 2, measures: { loss: 2.5, bleu: 10 } },
  ]);
  assert.deepEqual(
    found.map(({ title }) => title),
    ["Loss", "Learning rate", "Validation: bleu"],
  );
  assert.deepEqual(found[0].series[1].points, [[2, 2.5]]);
});
