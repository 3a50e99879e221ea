import assert from "node:assert/strict";
import { test } from "node:test";
import { mergeHash, parseHash, toHash } from "../src/shell/urlState.ts";
import { RequestQueue } from "../src/transport/requestQueue.ts";
import { SnapshotTransport } from "../src/transport/snapshot.ts";
import { canonicalJson, parseError } from "../src/transport/transport.ts";
import { WidgetTransport } from "../src/transport/widget.ts";

test("canonical JSON does not depend on the order of keys", () => {
  const first = { b: [1, { d: 2, c: 1.0 }], a: "x" },
    second = { a: "x", b: [1.0, { c: 1, d: 2 }] };
  assert.equal(canonicalJson(first), canonicalJson(second));
  assert.equal(canonicalJson({ a: undefined, b: null }), '{"b":null}');
});

test("a snapshot answers by question and parameters", async () => {
  const transport = new SnapshotTransport([
    { question: "mask", params: { expression: "causal", length: 16 }, answer: { mask: "causal" } },
  ]);
  assert.ok(transport.supports("mask") && !transport.supports("beam"));
  const answer = await transport.ask("mask", { length: 16, expression: "causal" } as never);
  assert.deepEqual(answer, { mask: "causal" });
  const missing = transport.ask("mask", { expression: "full", length: 16 } as never);
  await assert.rejects(missing, /precomputed answers only/);
});

test("a widget's replies are matched by id", async () => {
  const sent: { id: string }[] = [];
  let onMessage: (message: unknown) => void = () => undefined;
  const transport = new WidgetTransport({
    send: (content) => sent.push(content as { id: string }),
    on: (_, listener) => {
      onMessage = listener;
    },
  });
  const first = transport.ask("model_info", {}),
    second = transport.ask("runs", {});
  onMessage({ id: "of another view", answer: {} });
  onMessage({ id: sent[1].id, error: { message: "no runs here", code: "none" } });
  onMessage({ id: sent[0].id, answer: { name: "tiny" } });
  assert.deepEqual(await first, { name: "tiny" });
  await assert.rejects(second, /no runs here/);
});

test("errors are recognized in answers", () => {
  assert.equal(parseError({ error: { message: "gone", code: "expired" } })?.code, "expired");
  assert.equal(parseError({ detail: "not found" })?.message, "not found");
  assert.equal(parseError({ tokens: [] }), null);
});

test("a queue runs the newest request first, a few at a time, and drops unwanted ones", async () => {
  const done: string[] = [];
  const queue = new RequestQueue(1);
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

test("the URL holds the state, without long texts", () => {
  const params = { view: "masks", mask: "causal & window(3) | prefix(1)", text: "हिन्दी = ?&#" };
  assert.deepEqual(parseHash(toHash(params)), params);
  const long = { text: "x".repeat(3000), head: "2" };
  assert.deepEqual(parseHash(toHash(long)), { head: "2" });
  assert.deepEqual(mergeHash(long, "#head=3"), { text: long.text, head: "3" });
});
