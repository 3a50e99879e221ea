import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { entropy, filterLogits, rankTokens, sampleIndex, type SamplingParams } from "../src/filters.ts";

const DEFAULTS: SamplingParams = { temperature: 1, topK: 0, topP: 1, minP: 0 };
const probabilities = (logits: number[], params: Partial<SamplingParams>) => {
  const row = Float32Array.from(logits),
    order = rankTokens(row);
  const { probabilities: rankedProbabilities } = filterLogits(row, order, { ...DEFAULTS, ...params });
  const out = new Array<number>(logits.length).fill(0);
  order.forEach((id, n) => {
    out[id] = rankedProbabilities[n];
  });
  return out;
};
const assertClose = (actual: number[], expected: number[]) =>
  actual.forEach((value, n) => {
    assert.ok(Math.abs(value - expected[n]) < 1e-6, `${actual} is not ${expected}`);
  });
const LOGS = [0.5, 0.25, 0.125, 0.125].map(Math.log);

test("tokens are ranked by logit, ties by descending id", () => {
  assert.deepEqual([...rankTokens(Float32Array.of(1, 3, -2, 3, 0, -0))], [3, 1, 0, 5, 4, 2]);
  assert.deepEqual([...rankTokens(Float32Array.of(-Infinity, -1e30, Infinity))], [2, 1, 0]);
});

test("without filters it is the softmax", () =>
  assertClose(probabilities(LOGS, {}), [0.5, 0.25, 0.125, 0.125]));
test("temperature", () =>
  assertClose(
    probabilities(LOGS, { temperature: 0.5 }),
    [16, 4, 1, 1].map((n) => n / 22),
  ));
test("top-k keeps ties", () => assertClose(probabilities(LOGS, { topK: 3 }), [0.5, 0.25, 0.125, 0.125]));
test("top-k", () => assertClose(probabilities(LOGS, { topK: 2 }), [2 / 3, 1 / 3, 0, 0]));
test("top-p", () => assertClose(probabilities(LOGS, { topP: 0.7 }), [2 / 3, 1 / 3, 0, 0]));
test("top-p always keeps one", () => assertClose(probabilities(LOGS, { topP: 0.01 }), [1, 0, 0, 0]));
test("min-p", () => assertClose(probabilities(LOGS, { minP: 0.4 }), [2 / 3, 1 / 3, 0, 0]));
test("filters are applied in sequence", () =>
  assertClose(probabilities(LOGS, { topK: 2, topP: 0.6 }), [1, 0, 0, 0]));
test("a logit of -∞ has probability 0", () =>
  assertClose(probabilities([0, -Infinity, 0], {}), [0.5, 0, 0.5]));

test("entropy is in bits", () => {
  assert.equal(entropy(Float64Array.of(0.5, 0.25, 0.25, 0)), 1.5);
});

test("sampling follows the probabilities", () => {
  const half = Float64Array.of(0.5, 0.5, 0);
  assert.equal(sampleIndex(half, 0), 0);
  assert.equal(sampleIndex(half, 0.49), 0);
  assert.equal(sampleIndex(half, 0.5), 1);
  assert.equal(sampleIndex(half, 0.999999), 1);
});

// The cases are written by tests/serving/test_page_logic.py, with keepleft's own filters.
const cases = process.env.KEEPLEFT_FILTER_CASES;
const skip = cases === undefined && "KEEPLEFT_FILTER_CASES is not set";
test("the same as keepleft's own filters", { skip }, () => {
  for (const { logits, params, expected } of JSON.parse(readFileSync(cases!, "utf8")) as {
    logits: number[];
    params: SamplingParams;
    expected: number[];
  }[]) {
    const actual = probabilities(logits, params);
    assert.deepEqual(
      actual.map((probability) => probability > 0),
      expected.map((probability) => probability > 0),
      JSON.stringify(params),
    );
    assertClose(actual, expected);
  }
});
