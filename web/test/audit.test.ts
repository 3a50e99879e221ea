import assert from "node:assert/strict";
import { mock, test } from "node:test";
import type { AuditAnswer, AuditParams } from "../src/api.ts";
import { AuditMonitor } from "../src/views/leaks/auditMonitor.ts";

const PROGRESS = { fraction: 0.5, checks: [], findings: [] } as unknown as AuditAnswer["progress"];

function answerOf(state: AuditAnswer["state"]): AuditAnswer {
  const hasProgress = state !== "waiting" && state !== "none";
  return { state, budget: "quick", seconds: 1, ...(hasProgress ? { progress: PROGRESS } : {}) };
}

/** A monitor whose questions are answered in turn, and all that it asks. */
function monitorOf(...states: AuditAnswer["state"][]) {
  const asked: AuditParams[] = [];
  const monitor = new AuditMonitor(async (params) => {
    asked.push(params);
    const state = states.shift();
    if (state === undefined) throw new Error("the server is gone");
    return answerOf(state);
  });
  return { monitor, asked };
}

async function settle(): Promise<void> {
  for (let n = 0; n < 5; n++) await Promise.resolve();
}

async function pass(milliseconds: number): Promise<void> {
  await settle();
  mock.timers.tick(milliseconds);
  await settle();
}

test("an audit is started once, then followed until it is done", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const { monitor, asked } = monitorOf("waiting", "running", "running", "done");
  monitor.choose("standard");
  monitor.start();
  monitor.choose("full"); // too late
  for (let n = 0; n < 6; n++) await pass(500);
  assert.deepEqual(
    asked.map(({ action, budget }) => [action, budget]),
    ["start", "start", "poll", "poll"].map((action) => [action, "standard"]),
  );
  const { isRunning, error, answer } = monitor.state.get();
  assert.deepEqual([isRunning, error, answer?.state], [false, "", "done"]);
  mock.timers.reset();
});

test("a stopped audit keeps what it has found, and asks no more", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const { monitor, asked } = monitorOf("running", "stopping", "running");
  monitor.start();
  await settle();
  monitor.stop();
  monitor.stop();
  for (let n = 0; n < 3; n++) await pass(500);
  assert.deepEqual(
    asked.map(({ action }) => action),
    ["start", "stop"],
  );
  assert.equal(asked[0].client, asked[1].client);
  assert.equal(monitor.state.get().answer?.state, "stopped");
  assert.equal(monitor.state.get().isRunning, false);
  mock.timers.reset();
});

test("an audit that is lost or fails is not started again by itself", async () => {
  for (const [states, message] of [
    [["running", "none"], /process of the audit has ended/],
    [["running"], /the server is gone/],
  ] as const) {
    mock.timers.enable({ apis: ["setTimeout"] });
    const { monitor, asked } = monitorOf(...states);
    monitor.start();
    for (let n = 0; n < 4; n++) await pass(500);
    assert.match(monitor.state.get().error, message);
    assert.equal(monitor.state.get().isRunning, false);
    assert.equal(asked.length, 2);
    mock.timers.reset();
  }
});
