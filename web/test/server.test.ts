import assert from "node:assert/strict";
import { mock, test } from "node:test";
import type { ServerStatus, TenantStatus } from "../src/api.ts";
import { splitAtGaps } from "../src/components/chart.tsx";
import { HttpTransport } from "../src/transport/http.ts";
import {
  formatBytes,
  formatCount,
  formatDuration,
  formatRate,
  formatSeconds,
} from "../src/views/server/format.ts";
import { addStatus, currentRates, EMPTY_HISTORY, HISTORY_SECONDS } from "../src/views/server/history.ts";
import { ServerMonitor } from "../src/views/server/monitor.ts";

function tenant(label: string, promptTokens: number, generationTokens: number): TenantStatus {
  return { label, prompt_tokens: promptTokens, generation_tokens: generationTokens } as TenantStatus;
}

/** A status whose engine has read 10 tokens a second and generated 4, all for one key. */
function statusAt(uptime: number, changes: Partial<ServerStatus> = {}): ServerStatus {
  return {
    uptime,
    engine_age: 0,
    steps: 2 * uptime,
    step_seconds: 0.1 * uptime,
    prompt_tokens: 10 * uptime,
    generation_tokens: 4 * uptime,
    queue: { running_rows: 3, waiting: 2, paused: 1 },
    tenants: [tenant("a", 10 * uptime, 4 * uptime), tenant("b", 5, 5)],
    ...changes,
  } as ServerStatus;
}

const historyOf = (...statuses: ServerStatus[]) => statuses.reduce(addStatus, EMPTY_HISTORY);

test("counters become rates, in total and by key", () => {
  assert.equal(currentRates(historyOf(statusAt(7))), null);
  const rates = currentRates(historyOf(statusAt(7), statusAt(8), statusAt(9)));
  assert.deepEqual([rates?.prompt, rates?.generation], [10, 4]);
  assert.ok(Math.abs((rates?.stepSeconds ?? 0) - 0.05) < 1e-9);
  assert.deepEqual(rates?.byTenant.get("a"), { prompt: 10, generation: 4 });
  assert.deepEqual(rates?.byTenant.get("b"), { prompt: 0, generation: 0 });
});

test("a key that is new in the table has no rate yet, and a server without steps no step time", () => {
  const later = statusAt(8, { steps: 14, tenants: [tenant("c", 1, 1)] });
  const rates = currentRates(historyOf(statusAt(7), later));
  assert.equal(rates?.byTenant.size, 0);
  assert.equal(rates?.stepSeconds, null);
});

test("rates are by the time that the engine was asked, not by the time of the answer", () => {
  const late = { ...statusAt(9), uptime: 12, engine_age: 3 };
  const rates = currentRates(historyOf(statusAt(7), late));
  assert.equal(rates?.generation, 4);
});

test("an answer that tells nothing new adds no sample", () => {
  const again = { ...statusAt(8), uptime: 9, engine_age: 1 };
  const history = historyOf(statusAt(7), statusAt(8), again);
  assert.equal(history.samples.length, 1);
  assert.equal(history.statuses.at(-1)?.uptime, 9);
});

test("the history is bounded", () => {
  const history = historyOf(...Array.from({ length: 1000 }, (_, n) => statusAt(n)));
  assert.equal(history.samples.length, HISTORY_SECONDS + 1);
  assert.ok(history.statuses.length <= 7);
  assert.deepEqual(history.samples.at(-1), {
    time: 999,
    promptRate: 10,
    generationRate: 4,
    runningRows: 3,
    waiting: 2,
    paused: 1,
  });
});

test("nothing is made up for the time that nobody looked, or for a server that was restarted", () => {
  const before = historyOf(statusAt(7), statusAt(8));
  const afterGap = addStatus(before, statusAt(100));
  assert.equal(afterGap.samples.length, 1);
  assert.equal(currentRates(afterGap), null);
  assert.equal(addStatus(afterGap, statusAt(101)).samples.length, 2);
  assert.deepEqual(addStatus(before, statusAt(1)), { statuses: [statusAt(1)], samples: [] });
});

test("a line is broken at a gap", () => {
  const points: [number, number][] = [
    [0, 1],
    [1, 1],
    [9, 1],
  ];
  assert.deepEqual(splitAtGaps(points, 5), [points.slice(0, 2), points.slice(2)]);
  assert.deepEqual(splitAtGaps(points, Infinity), [points]);
  assert.deepEqual(splitAtGaps([], 5), []);
});

test("the monitor asks once a second while somebody looks, and less often after an error", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  try {
    let asked = 0,
      isReachable = true;
    const monitor = new ServerMonitor(() => {
      asked++;
      return isReachable ? Promise.resolve(statusAt(asked)) : Promise.reject(new Error("gone"));
    });
    const pass = async (milliseconds: number) => {
      mock.timers.tick(milliseconds);
      for (let n = 0; n < 10; n++) await Promise.resolve();
    };
    monitor.start();
    await pass(0);
    assert.equal(asked, 1);
    await pass(1000);
    assert.equal(asked, 2);
    monitor.stop();
    await pass(60_000);
    assert.equal(asked, 2);
    isReachable = false;
    monitor.start();
    await pass(0);
    assert.equal(monitor.state.get().error, "gone");
    assert.equal(monitor.state.get().history.statuses.length, 2);
    await pass(1000);
    assert.equal(asked, 3);
    isReachable = true;
    await pass(2000);
    assert.equal(asked, 4);
    assert.equal(monitor.state.get().error, "");
    monitor.stop();
  } finally {
    mock.timers.reset();
  }
});

test("an answer that comes after the monitor was stopped is dropped", async () => {
  let answer: (status: ServerStatus) => void = () => undefined;
  const monitor = new ServerMonitor(() => new Promise((resolve) => (answer = resolve)));
  monitor.start();
  monitor.stop();
  answer(statusAt(1));
  await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual(monitor.state.get().history, EMPTY_HISTORY);
});

test("only the operator's page can ask for the status", () => {
  assert.equal(new HttpTransport("http://localhost/explore/").readServerStatus, undefined);
  assert.equal(typeof new HttpTransport("http://localhost/explore/", "server").readServerStatus, "function");
});

test("numbers are short", () => {
  assert.deepEqual([0, 45.9, 60, 200, 7500, 200_000].map(formatDuration), [
    "0 s",
    "45 s",
    "1 min",
    "3 min 20 s",
    "2 h 5 min",
    "2 d 7 h",
  ]);
  assert.deepEqual([0.0042, 0.085, 1.24, 84, null].map(formatSeconds), [
    "4.2 ms",
    "85 ms",
    "1.2 s",
    "1 min 24 s",
    "–",
  ]);
  assert.deepEqual([0, 4.25, 42.4, 12_345, undefined].map(formatRate), ["0", "4.3", "42", "12,345", "–"]);
  assert.deepEqual([1500, 1_234_567].map(formatCount), ["1,500", "1.2M"]);
  assert.deepEqual([5 << 20, 300 << 20, 1.5 * 2 ** 30].map(formatBytes), ["5.0 MiB", "300 MiB", "1.5 GiB"]);
});
