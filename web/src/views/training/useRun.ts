/** A run that may still be going on: its lines are asked for as they come. */

import { useEffect, useState } from "preact/hooks";
import type { Line } from "../../api.ts";
import type { Series } from "../../components/chart.tsx";
import { usePage } from "../../shell/hooks.ts";
import { said } from "../../transport/transport.ts";

const AGAIN = 2000; // milliseconds
const MANY = 1000; // lines: there may be more behind them

export interface Watched {
  lines: Line[];
  config: string;
  ended: boolean;
  error: string;
}

const NOTHING: Watched = { lines: [], config: "", ended: false, error: "" };

export function useRun(name: string | null): Watched {
  const { source } = usePage();
  const [state, set] = useState<Watched>(NOTHING);
  useEffect(() => {
    set(NOTHING);
    if (name === null) return;
    let here = true,
      after = 0,
      wait = 0;
    const look = () =>
      source.ask("run", { name, after }).then(
        (answer) => {
          if (!here) return;
          // A run that was begun anew has fewer lines than were seen: then all of it is new.
          const fresh = answer.from === 0 || answer.next < after || after === 0;
          after = answer.next;
          set((before) => ({
            lines: fresh ? answer.lines : answer.lines.length === 0 ? before.lines : [...before.lines, ...answer.lines],
            config: answer.config || before.config,
            ended: answer.ended,
            error: "",
          }));
          if (!answer.ended) wait = window.setTimeout(look, answer.lines.length >= MANY ? 0 : AGAIN);
        },
        (wrong: unknown) => {
          if (!here) return;
          set((before) => ({ ...before, error: said(wrong) }));
          if (source.can("attention")) wait = window.setTimeout(look, 4 * AGAIN);
        },
      );
    void look();
    return () => {
      here = false;
      window.clearTimeout(wait);
    };
  }, [source, name]);
  return state;
}

/** What can be drawn of these lines. */
export function curves(lines: Line[], task = ""): { title: string; y: string; log: boolean; series: Series[] }[] {
  const of = (value: (line: Line) => number | undefined): [number, number][] =>
    lines.flatMap((line) => {
      const v = value(line);
      return typeof v === "number" ? [[line.step, v] as [number, number]] : [];
    });
  const measures = [...new Set(lines.flatMap((line) => Object.keys(line.measures ?? {})))].filter((name) => name !== "loss");
  const labels = task === "classify";
  return [
    {
      title: "Loss",
      y: `cross-entropy per ${labels ? "text" : "token"}`,
      log: true,
      series: [
        { name: "training", points: of((line) => line.plain ?? line.loss) },
        { name: "validation", points: of((line) => line.measures?.loss) },
      ],
    },
    {
      title: `${labels ? "Labels" : "Tokens"} right`,
      y: "share",
      log: false,
      series: [
        { name: "training", points: of((line) => line.accuracy) },
        { name: "validation", points: of((line) => line.measures?.accuracy) },
      ],
    },
    { title: "Learning rate", y: "", log: false, series: [{ name: "rate", points: of((line) => line.rate) }] },
    { title: "Size of the gradients", y: "norm", log: true, series: [{ name: "norm", points: of((line) => line.norm) }] },
    { title: "Speed", y: "targets a second", log: false, series: [{ name: "speed", points: of((line) => line.speed) }] },
    ...measures
      .filter((name) => name !== "accuracy")
      .map((name) => ({
        title: `Validation: ${name}`,
        y: name,
        log: false,
        series: [{ name, points: of((line) => line.measures?.[name]) }],
      })),
  ]
    .map((chart) => ({ ...chart, series: chart.series.filter(({ points }) => points.length > 0) }))
    .filter(({ series }) => series.length > 0);
}
