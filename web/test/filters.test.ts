import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { type Dials, drawn, entropy, narrowed, ranked } from "../src/filters.ts";

const NEUTRAL: Dials = { temperature: 1, topK: 0, topP: 1, minP: 0 };
const chances = (scores: number[], dials: Partial<Dials>) => {
  const row = Float32Array.from(scores),
    order = ranked(row);
  const { chances: ranks } = narrowed(row, order, { ...NEUTRAL, ...dials });
  const out = new Array<number>(scores.length).fill(0);
  order.forEach((id, n) => {
    out[id] = ranks[n];
  });
  return out;
};
const near = (found: number[], wanted: number[]) =>
  found.forEach((value, n) => assert.ok(Math.abs(value - wanted[n]) < 1e-6, `${found} is not ${wanted}`));
const LOGS = [0.5, 0.25, 0.125, 0.125].map(Math.log);

test("the likeliest comes first, of equals the higher id", () => {
  assert.deepEqual([...ranked(Float32Array.of(1, 3, -2, 3, 0, -0))], [3, 1, 0, 5, 4, 2]);
  assert.deepEqual([...ranked(Float32Array.of(-Infinity, -1e30, Infinity))], [2, 1, 0]);
});

test("without filters it is the softmax", () => near(chances(LOGS, {}), [0.5, 0.25, 0.125, 0.125]));
test("temperature", () =>
  near(
    chances(LOGS, { temperature: 0.5 }),
    [16, 4, 1, 1].map((n) => n / 22),
  ));
test("top-k keeps those just as likely as the last", () => near(chances(LOGS, { topK: 3 }), [0.5, 0.25, 0.125, 0.125]));
test("top-k", () => near(chances(LOGS, { topK: 2 }), [2 / 3, 1 / 3, 0, 0]));
test("top-p keeps what reaches p", () => near(chances(LOGS, { topP: 0.7 }), [2 / 3, 1 / 3, 0, 0]));
test("top-p always keeps one", () => near(chances(LOGS, { topP: 0.01 }), [1, 0, 0, 0]));
test("min-p is a share of the likeliest", () => near(chances(LOGS, { minP: 0.4 }), [2 / 3, 1 / 3, 0, 0]));
test("filters work on what the ones before them left", () => near(chances(LOGS, { topK: 2, topP: 0.6 }), [1, 0, 0, 0]));
test("what is impossible stays so", () => near(chances([0, -Infinity, 0], {}), [0.5, 0, 0.5]));

test("entropy is in bits", () => {
  assert.equal(entropy(Float64Array.of(0.5, 0.25, 0.25, 0)), 1.5);
});

test("a number between 0 and 1 falls on a token by its chance", () => {
  const half = Float64Array.of(0.5, 0.5, 0);
  assert.equal(drawn(half, 0), 0);
  assert.equal(drawn(half, 0.49), 0);
  assert.equal(drawn(half, 0.5), 1);
  assert.equal(drawn(half, 0.999999), 1);
});

// The slow definition writes what it finds into this file: see tests/serving/test_page_logic.py.
const cases = process.env.KEEPLEFT_FILTER_CASES;
test("the same as keepleft's own filters", { skip: cases === undefined && "no cases were given" }, () => {
  for (const { scores, dials, wanted } of JSON.parse(readFileSync(cases!, "utf8")) as {
    scores: number[];
    dials: Dials;
    wanted: number[];
  }[]) {
    const found = chances(scores, dials);
    assert.deepEqual(
      found.map((chance) => chance > 0),
      wanted.map((chance) => chance > 0),
      JSON.stringify(dials),
    );
    near(found, wanted);
  }
});
