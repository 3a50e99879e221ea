import assert from "node:assert/strict";
import { test } from "node:test";
import { clusters, label, loose, membership, together } from "../src/graphemes.ts";

const of = (...texts: string[]) => clusters(texts.map((text, id) => ({ id, text, special: text.startsWith("<") })));
const texts = (...given: string[]) => of(...given).map((group) => group.text);

test("words stay as they are", () => {
  assert.deepEqual(texts(" the", " sea", "s", "."), [" the", " sea", "s", "."]);
});

test("a vowel sign stays with its letter", () => {
  assert.deepEqual(texts("न", "म", "स", "्", "त", "े"), ["न", "म", "स्ते"]);
});

test("a letter in several bytes is shown once it is whole", () => {
  assert.deepEqual(texts(" le", "\\xc3", "é"), [" le", "é"]);
  assert.deepEqual(texts("\\xe0", "\\xa4", "न", "म"), ["न", "म"]);
  assert.deepEqual(texts("a\\xe0\\xa4", "न"), ["aन"]);
});

test("bytes that never become a letter stay to be seen", () => {
  assert.deepEqual(texts("a", "\\xe0", "\\xa4"), ["a", "\\xe0\\xa4"]);
});

test("an accent that was split off is put back", () => {
  assert.deepEqual(texts("e", "\u0301", "t"), ["e\u0301", "t"]);
});

test("a joined emoji is one", () => {
  assert.deepEqual(texts("👩", "\u200d", "🚀", "!"), ["👩\u200d🚀", "!"]);
  assert.deepEqual(texts("👍", "🏽"), ["👍🏽"]);
  assert.deepEqual(texts("🇫", "🇷"), ["🇫🇷"]);
});

test("a special token belongs to nobody", () => {
  assert.deepEqual(texts("<s>", "ा", "x"), ["<s>", "ा", "x"]);
});

test("every token is in one cluster, in order", () => {
  const groups = of("न", "म", "स", "्", "त", "े", "!");
  assert.deepEqual([...membership(groups, 7)], [0, 1, 2, 2, 2, 2, 3]);
  assert.equal(groups[0].first, 0);
  assert.equal(groups.at(-1)!.end, 7);
});

test("spaces and line ends have signs where they are alone", () => {
  assert.equal(label(" "), "␣");
  assert.equal(label("\n"), "↵");
  assert.equal(label(" sea"), "sea");
  assert.equal(label(""), "∅");
});

test("whole words without their spaces are put apart, pieces and letters are not", () => {
  const tokens = (...texts: string[]) => texts.map((text, id) => ({ id, text, special: false }));
  assert.equal(together(tokens("the", "old", "ship", ".")), "the old ship .");
  assert.equal(together(tokens("The", " old", " ship", "s")), "The old ships");
  assert.equal(loose(tokens("न", "म", "स", "्", "त", "े")), false);
  assert.equal(loose(tokens("word")), false);
});
