import assert from "node:assert/strict";
import { test } from "node:test";
import { clusterIndices, displayLabel, graphemeClusters, joinTokens, omitsSpaces } from "../src/graphemes.ts";

const clustersOf = (...texts: string[]) =>
  graphemeClusters(texts.map((text, id) => ({ id, text, special: text.startsWith("<") })));
const clusterTexts = (...tokenTexts: string[]) => clustersOf(...tokenTexts).map((cluster) => cluster.text);

test("words stay as they are", () => {
  assert.deepEqual(clusterTexts(" the", " sea", "s", "."), [" the", " sea", "s", "."]);
});

test("a vowel sign stays with its letter", () => {
  assert.deepEqual(clusterTexts("न", "म", "स", "्", "त", "े"), ["न", "म", "स्ते"]);
});

test("a character of several tokens is shown once it is complete", () => {
  assert.deepEqual(clusterTexts(" le", "\\xc3", "é"), [" le", "é"]);
  assert.deepEqual(clusterTexts("\\xe0", "\\xa4", "न", "म"), ["न", "म"]);
  assert.deepEqual(clusterTexts("a\\xe0\\xa4", "न"), ["aन"]);
});

test("incomplete bytes at the end stay visible", () => {
  assert.deepEqual(clusterTexts("a", "\\xe0", "\\xa4"), ["a", "\\xe0\\xa4"]);
});

test("a combining accent joins its letter", () => {
  assert.deepEqual(clusterTexts("e", "\u0301", "t"), ["e\u0301", "t"]);
});

test("an emoji sequence is one cluster", () => {
  assert.deepEqual(clusterTexts("👩", "\u200d", "🚀", "!"), ["👩\u200d🚀", "!"]);
  assert.deepEqual(clusterTexts("👍", "🏽"), ["👍🏽"]);
  assert.deepEqual(clusterTexts("🇫", "🇷"), ["🇫🇷"]);
});

test("special tokens are not joined", () => {
  assert.deepEqual(clusterTexts("<s>", "ा", "x"), ["<s>", "ा", "x"]);
});

test("every token is in one cluster, in order", () => {
  const clusters = clustersOf("न", "म", "स", "्", "त", "े", "!");
  assert.deepEqual([...clusterIndices(clusters, 7)], [0, 1, 2, 2, 2, 2, 3]);
  assert.equal(clusters[0].first, 0);
  assert.equal(clusters.at(-1)!.end, 7);
});

test("lone spaces and line breaks are shown as symbols", () => {
  assert.equal(displayLabel(" "), "␣");
  assert.equal(displayLabel("\n"), "↵");
  assert.equal(displayLabel(" sea"), "sea");
  assert.equal(displayLabel(""), "∅");
});

test("spaces are added between word-level tokens only", () => {
  const tokens = (...texts: string[]) => texts.map((text, id) => ({ id, text, special: false }));
  assert.equal(joinTokens(tokens("the", "old", "ship", ".")), "the old ship .");
  assert.equal(joinTokens(tokens("The", " old", " ship", "s")), "The old ships");
  assert.equal(omitsSpaces(tokens("न", "म", "स", "्", "त", "े")), false);
  assert.equal(omitsSpaces(tokens("word")), false);
});
