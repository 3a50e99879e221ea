/** The figures that an operator looks at first. */

import type { ComponentChildren } from "preact";
import type { ServerStatus } from "../../api.ts";
import { formatBytes, formatCount, formatPercent, formatRate, formatSeconds } from "./format.ts";
import type { Rates } from "./history.ts";
import { Meter } from "./meter.tsx";

const LONG_WAIT_SECONDS = 10; // in the queue

export function Figures({ status, rates }: { status: ServerStatus; rates: Rates | null }) {
  const { queue, cache, connections, time_to_first_token: ttft } = status;
  return (
    <div class="figures">
      <Figure
        title="Throughput"
        value={formatRate(rates?.generation)}
        unit="tokens/s"
        note={`prompts ${formatRate(rates?.prompt)} tokens/s`}
      />
      <Figure
        title="Batch"
        value={formatCount(queue.running_rows)}
        unit={queue.max_rows === null ? "texts" : `of ${formatCount(queue.max_rows)} rows`}
        note={`${formatSeconds(rates?.stepSeconds)} per step`}
      >
        {queue.max_rows !== null && (
          <Meter
            label="Rows of the batch"
            parts={[{ name: "running", value: queue.running_rows }]}
            total={queue.max_rows}
          />
        )}
      </Figure>
      <Figure
        title="Queue"
        value={formatCount(queue.waiting)}
        unit="waiting"
        note={
          queue.oldest_wait > 0
            ? `longest for ${formatSeconds(queue.oldest_wait)}`
            : `${formatCount(queue.paused)} paused`
        }
        isAlert={queue.oldest_wait > LONG_WAIT_SECONDS}
      />
      {cache !== null && (
        <Figure
          title="KV cache"
          value={formatPercent(cache.used / cache.pages)}
          unit={`of ${formatBytes(cache.pages * cache.page_bytes)}`}
          note={`${formatCount(cache.preemptions)} preemptions`}
        >
          <Meter
            label="Pages of the KV cache"
            parts={[
              { name: "in use", value: cache.used },
              { name: "prefix cache", value: cache.prefix },
            ]}
            total={cache.pages}
          />
        </Figure>
      )}
      <Figure
        title="Time to first token"
        value={formatSeconds(ttft.p50)}
        unit="median"
        note={ttft.requests > 0 ? `95 % within ${formatSeconds(ttft.p95)}` : "none in the last 5 minutes"}
      />
      {connections !== null && (
        <Figure
          title="Connections"
          value={formatCount(connections.open)}
          unit={`of ${formatCount(connections.limit)}`}
          note={`${formatCount(connections.refused)} refused`}
        >
          <Meter
            label="Open connections"
            parts={[{ name: "open", value: connections.open }]}
            total={connections.limit}
          />
        </Figure>
      )}
    </div>
  );
}

interface FigureProps {
  title: string;
  value: string;
  unit: string;
  note: string;
  isAlert?: boolean;
  children?: ComponentChildren;
}

function Figure({ title, value, unit, note, isAlert = false, children }: FigureProps) {
  return (
    <section class="panel figure" aria-label={title}>
      <h3>{title}</h3>
      <p class="key-figure">
        {value} <span class="muted">{unit}</span>
      </p>
      {children}
      <p class={isAlert ? "alert" : "muted"}>
        {isAlert && "▲ "}
        {note}
      </p>
    </section>
  );
}
