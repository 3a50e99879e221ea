/** What the server's counters say about the last minutes: rates between answers, and samples for charts. */

import type { ServerStatus } from "../../api.ts";

export const HISTORY_SECONDS = 180;
export const MAX_GAP_SECONDS = 15; // between two answers; after a longer gap nothing is known in between
const RATE_SECONDS = 5; // that the figures are averaged over

/** At one moment; rates are per second, since the sample before. */
export interface Sample {
  time: number; // on the server's clock
  promptRate: number;
  generationRate: number;
  runningRows: number;
  waiting: number;
  paused: number;
}

export interface Rates {
  prompt: number;
  generation: number;
  stepSeconds: number | null; // of one step; null if there was none
  byTenant: Map<string, { prompt: number; generation: number }>;
}

export interface History {
  statuses: ServerStatus[]; // those that the rates are computed from
  samples: Sample[];
}

export const EMPTY_HISTORY: History = { statuses: [], samples: [] };

/** The moment that a status describes: the engine may have been asked some time before it answered. */
export function engineTime(status: ServerStatus): number {
  return status.uptime - status.engine_age;
}

/** The history with one more answer. It starts anew with a server that was restarted. */
export function addStatus(history: History, status: ServerStatus): History {
  const previous = history.statuses.at(-1);
  if (previous === undefined || status.uptime < previous.uptime) {
    return { statuses: [status], samples: [] };
  }
  const time = engineTime(status);
  const seconds = time - engineTime(previous);
  if (seconds <= 0) return { ...history, statuses: [...history.statuses.slice(0, -1), status] };
  if (seconds > MAX_GAP_SECONDS) return { ...history, statuses: [status] };
  const sample: Sample = {
    time,
    promptRate: (status.prompt_tokens - previous.prompt_tokens) / seconds,
    generationRate: (status.generation_tokens - previous.generation_tokens) / seconds,
    runningRows: status.queue.running_rows,
    waiting: status.queue.waiting,
    paused: status.queue.paused,
  };
  return {
    statuses: [
      ...history.statuses.filter((item) => item === previous || time - engineTime(item) < RATE_SECONDS + 0.5),
      status,
    ],
    samples: [...history.samples, sample].filter((item) => time - item.time <= HISTORY_SECONDS),
  };
}

/** Mean rates of the last seconds; null before the second answer. */
export function currentRates({ statuses }: History): Rates | null {
  const first = statuses[0],
    last = statuses.at(-1);
  if (last === undefined || first === last) return null;
  const seconds = engineTime(last) - engineTime(first);
  const steps = last.steps - first.steps;
  const firstTenants = new Map(first.tenants.map((tenant) => [tenant.label, tenant]));
  const byTenant: Rates["byTenant"] = new Map();
  for (const tenant of last.tenants) {
    const before = firstTenants.get(tenant.label);
    if (before === undefined) continue;
    byTenant.set(tenant.label, {
      prompt: (tenant.prompt_tokens - before.prompt_tokens) / seconds,
      generation: (tenant.generation_tokens - before.generation_tokens) / seconds,
    });
  }
  return {
    prompt: (last.prompt_tokens - first.prompt_tokens) / seconds,
    generation: (last.generation_tokens - first.generation_tokens) / seconds,
    stepSeconds: steps > 0 ? (last.step_seconds - first.step_seconds) / steps : null,
    byTenant,
  };
}
