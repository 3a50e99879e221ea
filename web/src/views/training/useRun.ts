/** The metrics of a run, which is polled while it is running. */

import { useEffect, useState } from "preact/hooks";
import type { MetricsLine } from "../../api.ts";
import type { Series } from "../../components/chart.tsx";
import { useExplorer } from "../../shell/hooks.ts";
import { errorMessage } from "../../transport/transport.ts";

const POLL_MS = 2000;
const MAX_LINES_PER_ANSWER = 1000; // after a full answer the next one is requested at once

export interface RunState {
  lines: MetricsLine[];
  config: string;
  isFinished: boolean;
  error: string;
}

const EMPTY_RUN: RunState = { lines: [], config: "", isFinished: false, error: "" };

export function useRun(name: string | null): RunState {
  const { transport } = useExplorer();
  const [state, setState] = useState<RunState>(EMPTY_RUN);
  useEffect(() => {
    setState(EMPTY_RUN);
    if (name === null) return;
    let isActive = true,
      nextLine = 0,
      timer = 0;
    const poll = () =>
      transport.ask("run", { name, from_line: nextLine }).then(
        (answer) => {
          if (!isActive) return;
          // A run that was restarted has fewer lines than were read: its lines replace the old ones.
          const isRestarted = answer.first_line === 0 || answer.next_line < nextLine || nextLine === 0;
          nextLine = answer.next_line;
          setState((previous) => ({
            lines: isRestarted ? answer.lines : appendLines(previous.lines, answer.lines),
            config: answer.config || previous.config,
            isFinished: answer.finished,
            error: "",
          }));
          const delay = answer.lines.length >= MAX_LINES_PER_ANSWER ? 0 : POLL_MS;
          if (!answer.finished) timer = window.setTimeout(poll, delay);
        },
        (reason: unknown) => {
          if (!isActive) return;
          setState((previous) => ({ ...previous, error: errorMessage(reason) }));
          if (transport.supports("attention")) timer = window.setTimeout(poll, 4 * POLL_MS);
        },
      );
    void poll();
    return () => {
      isActive = false;
      window.clearTimeout(timer);
    };
  }, [transport, name]);
  return state;
}

/** Returns the same array if nothing is added, so that charts are not redrawn. */
function appendLines(lines: MetricsLine[], newLines: MetricsLine[]): MetricsLine[] {
  return newLines.length === 0 ? lines : [...lines, ...newLines];
}

interface RunChart {
  title: string;
  yLabel: string;
  logScale: boolean;
  series: Series[];
}

/** The charts of a run; those without any values are left out. */
export function runCharts(lines: MetricsLine[], task = ""): RunChart[] {
  const points = (value: (line: MetricsLine) => number | undefined): [number, number][] =>
    lines.flatMap((line) => {
      const v = value(line);
      return typeof v === "number" ? [[line.step, v] as [number, number]] : [];
    });
  const metricNames = new Set(lines.flatMap((line) => Object.keys(line.measures ?? {})));
  const otherMetrics = [...metricNames].filter((name) => name !== "loss" && name !== "accuracy");
  const isClassification = task === "classify";
  return [
    {
      title: "Loss",
      yLabel: `cross-entropy per ${isClassification ? "text" : "token"}`,
      logScale: true,
      series: [
        { name: "training", points: points((line) => line.plain ?? line.loss) },
        { name: "validation", points: points((line) => line.measures?.loss) },
      ],
    },
    {
      title: `${isClassification ? "Label" : "Token"} accuracy`,
      yLabel: "accuracy",
      logScale: false,
      series: [
        { name: "training", points: points((line) => line.accuracy) },
        { name: "validation", points: points((line) => line.measures?.accuracy) },
      ],
    },
    {
      title: "Learning rate",
      yLabel: "",
      logScale: false,
      series: [{ name: "learning rate", points: points((line) => line.rate) }],
    },
    {
      title: "Gradient norm",
      yLabel: "norm",
      logScale: true,
      series: [{ name: "norm", points: points((line) => line.norm) }],
    },
    {
      title: "Throughput",
      yLabel: "tokens per second",
      logScale: false,
      series: [{ name: "throughput", points: points((line) => line.speed) }],
    },
    ...otherMetrics.map((name) => ({
      title: `Validation: ${name}`,
      yLabel: name,
      logScale: false,
      series: [{ name, points: points((line) => line.measures?.[name]) }],
    })),
  ]
    .map((chart) => ({ ...chart, series: chart.series.filter(({ points }) => points.length > 0) }))
    .filter(({ series }) => series.length > 0);
}
