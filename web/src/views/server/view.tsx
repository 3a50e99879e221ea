/** The server view, for the operator: what the server does now and did in the last minutes. */

import { useEffect, useMemo } from "preact/hooks";
import type { ServerStatus } from "../../api.ts";
import { Chart, type XAxis } from "../../components/chart.tsx";
import { Status } from "../../components/controls.tsx";
import { useStore } from "../../store.ts";
import { BesideEngine } from "./besideEngine.tsx";
import { CacheUse } from "./cacheUse.tsx";
import { Connections } from "./connections.tsx";
import { Figures } from "./figures.tsx";
import { formatDuration, formatSeconds } from "./format.ts";
import { currentRates, engineTime, HISTORY_SECONDS, MAX_GAP_SECONDS, type Sample } from "./history.ts";
import type { ServerMonitor } from "./monitor.ts";
import { Responses } from "./responses.tsx";
import { Tenants } from "./tenants.tsx";

const LONG_STEP_SECONDS = 2; // a step of the engine that is worth a word
const STATES: Record<ServerStatus["status"], { mark: string; words: string; tone: string }> = {
  ready: { mark: "●", words: "Ready", tone: "good" },
  draining: { mark: "◐", words: "Draining: no new requests", tone: "alert" },
  stalled: { mark: "◌", words: "Stalled: a step of the engine does not end", tone: "alert" },
  failed: { mark: "☒", words: "Failed: the engine has stopped", tone: "alert" },
};
const TIME_AXIS: XAxis = {
  domain: [-HISTORY_SECONDS, 0],
  ticks: [-180, -120, -60, 0],
  format: formatSecondsAgo,
  maxGap: MAX_GAP_SECONDS,
};

interface Props {
  monitor: ServerMonitor;
  showModelName: boolean; // where the page's header does not
}

/** x is 0 now, and negative before. */
function formatSecondsAgo(x: number): string {
  if (x > -0.5) return "now";
  return x % 60 === 0 ? `${-x / 60} min` : `${(-x).toFixed(0)} s ago`;
}

export function ServerView({ monitor, showModelName }: Props) {
  const { history, error } = useStore(monitor.state);
  useEffect(() => {
    const onVisibilityChange = () => (document.hidden ? monitor.stop() : monitor.start());
    onVisibilityChange();
    document.addEventListener("visibilitychange", onVisibilityChange);
    return () => {
      document.removeEventListener("visibilitychange", onVisibilityChange);
      monitor.stop();
    };
  }, [monitor]);
  const rates = useMemo(() => currentRates(history), [history]);
  const status = history.statuses.at(-1);
  if (status === undefined) return <Status error={error} isLoading />;
  return (
    <>
      <Status error={error && `${error} These are the last figures; it is asked again.`} />
      <section class={error === "" ? "server" : "server stale"} aria-label="Server">
        <State status={status} showModelName={showModelName} />
        <Figures status={status} rates={rates} />
        <Charts samples={history.samples} now={engineTime(status)} />
        <Tenants status={status} rates={rates} />
        <div class="server-details">
          {status.cache !== null && <CacheUse cache={status.cache} />}
          {status.connections !== null && <Connections connections={status.connections} />}
          <BesideEngine work={status.beside_engine} />
          <Responses responses={status.responses} failures={status.failures} />
        </div>
      </section>
    </>
  );
}

function State({ status, showModelName }: { status: ServerStatus; showModelName: boolean }) {
  const { mark, words, tone } = STATES[status.status];
  const facts = [
    ...(showModelName ? [status.model] : []),
    `up ${formatDuration(status.uptime)}`,
    status.device,
    status.dtype,
    `${status.threads} ${status.threads === 1 ? "thread" : "threads"}`,
    `keepleft ${status.version}`,
  ];
  return (
    <div class="server-state">
      <p class={`verdict ${tone}`} role="status">
        <span aria-hidden="true">{mark}</span> {words}
      </p>
      <p class="muted facts">
        {facts.map((fact) => (
          <span key={fact}>{fact}</span>
        ))}
      </p>
      {status.engine_age > LONG_STEP_SECONDS && (
        <p class="alert">The engine has been busy with one step for {formatSeconds(status.engine_age)}.</p>
      )}
    </div>
  );
}

function Charts({ samples, now }: { samples: Sample[]; now: number }) {
  const points = (value: (sample: Sample) => number) =>
    samples.map((sample): [number, number] => [sample.time - now, value(sample)]);
  return (
    <div class="charts">
      <Chart
        title="Tokens per second"
        yLabel=""
        xLabel=""
        xAxis={TIME_AXIS}
        minTop={10}
        height={190}
        series={[
          { name: "generated", points: points((sample) => sample.generationRate) },
          { name: "prompt", points: points((sample) => sample.promptRate) },
        ]}
      />
      <Chart
        title="Batch and queue"
        yLabel=""
        xLabel=""
        xAxis={TIME_AXIS}
        minTop={4}
        height={190}
        series={[
          { name: "rows running", points: points((sample) => sample.runningRows) },
          { name: "requests waiting", points: points((sample) => sample.waiting) },
          { name: "requests paused", points: points((sample) => sample.paused) },
        ]}
      />
    </div>
  );
}
