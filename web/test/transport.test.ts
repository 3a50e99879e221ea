import assert from "node:assert/strict";
import { test } from "node:test";
import { Queue } from "../src/transport/requestQueue.ts";
import { RecordedSource } from "../src/transport/snapshot.ts";
import { canonical, refusal } from "../src/transport/transport.ts";
import { WidgetSource } from "../src/transport/widget.ts";
import { found, hashed, parsed } from "../src/shell/urlState.ts";

test("the same question is the same text, whatever the order of its words", () => {
  assert.equal(canonical({ b: [1, { d: 2, c: 1.0 }], a: "x" }), canonical({ a: "x", b: [1.0, { c: 1, d: 2 }] }));
  assert.equal(canonical({ a: undefined, b: null }), '{"b":null}');
});

test("recorded answers are found by their question", async () => {
  const source = new RecordedSource([
    { question: "mask", given: { expression: "causal", length: 16 }, answer: { mask: "causal" } },
  ]);
  assert.ok(source.can("mask") && !source.can("beam"));
  assert.deepEqual(await source.ask("mask", { length: 16, expression: "causal" } as never), { mask: "causal" });
  await assert.rejects(source.ask("mask", { expression: "full", length: 16 } as never), /recorded beforehand/);
});

test("a widget's replies find who asked", async () => {
  const sent: { id: string }[] = [];
  let hear: (message: unknown) => void = () => undefined;
  const source = new WidgetSource({
    send: (content) => sent.push(content as { id: string }),
    on: (_, listener) => {
      hear = listener;
    },
  });
  const first = source.ask("about", {}),
    second = source.ask("runs", {});
  hear({ id: "of another view", answer: {} });
  hear({ id: sent[1].id, error: { message: "no runs here", code: "none" } });
  hear({ id: sent[0].id, answer: { name: "tiny" } });
  assert.deepEqual(await first, { name: "tiny" });
  await assert.rejects(second, /no runs here/);
});

test("an error is told from an answer", () => {
  assert.equal(refusal({ error: { message: "gone", code: "forgotten" } })?.code, "forgotten");
  assert.equal(refusal({ detail: "not found" })?.message, "not found");
  assert.equal(refusal({ tokens: [] }), null);
});

test("a queue does the newest first, a few at a time, and nothing that is not wanted", async () => {
  const done: string[] = [];
  const queue = new Queue(1);
  const slow = (name: string) => () =>
    new Promise<void>((resolve) =>
      setImmediate(() => {
        done.push(name);
        resolve();
      }),
    );
  queue.add("a", slow("a"));
  queue.add("b", slow("b"));
  queue.add("c", slow("c"), () => false);
  queue.add("d", slow("d"));
  queue.add("a", slow("again"));
  for (let n = 0; n < 20; n++) await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual(done, ["a", "d", "b"]);
});

test("the address says what is looked at, and leaves long texts out", () => {
  const words = { view: "masks", mask: "causal & window(3) | prefix(1)", text: "हिन्दी = ?&#" };
  assert.deepEqual(parsed(hashed(words)), words);
  const long = { text: "x".repeat(3000), head: "2" };
  assert.deepEqual(parsed(hashed(long)), { head: "2" });
  assert.deepEqual(found(long, "#head=3"), { text: long.text, head: "3" });
});
