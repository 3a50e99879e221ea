/** Training: the curves of a run while it goes on, and what the mask is for, measured. */

import { useMemo } from "preact/hooks";
import { Chart } from "../../components/chart.tsx";
import { Choice, Notice } from "../../components/controls.tsx";
import { useAnswer, usePage, useWord } from "../../shell/hooks.ts";
import { Compared } from "./compare.tsx";
import { curves, useRun } from "./useRun.ts";

export function TrainingView() {
  const { source } = usePage();
  const { answer: compared, error } = useAnswer("compare", source.can("compare") ? {} : null);
  return (
    <>
      {source.can("runs") && <Runs />}
      <section aria-label="What the mask is for">
        <h2>What the mask is for</h2>
        <Notice error={error} />
        {compared !== null &&
          (compared.same || compared.masked ? (
            <Compared found={compared} />
          ) : (
            <p class="quiet">
              Nothing was compared yet. <code>keepleft compare</code> does it, in a minute or two.
            </p>
          ))}
      </section>
    </>
  );
}

function Runs() {
  const { answer, error, busy } = useAnswer("runs", {});
  const [name, sayName] = useWord("run", "");
  const runs = answer?.runs ?? [];
  const chosen = runs.find((run) => run.name === name) ?? runs[0] ?? null;
  const run = useRun(chosen?.name ?? null);
  const charts = useMemo(() => curves(run.lines, chosen?.task), [run.lines, chosen?.task]);
  const last = run.lines.at(-1);
  return (
    <section aria-label="Runs">
      <h2>Runs</h2>
      <Notice error={error} busy={busy && answer === null} />
      {answer !== null && runs.length === 0 && (
        <p class="quiet">
          There is no run to watch. Give the server the folder of your runs, or begin one with <code>keepleft train</code>.
        </p>
      )}
      {chosen !== null && (
        <>
          <div class="bar">
            <Choice
              label="Run"
              value={chosen.name}
              onChange={sayName}
              options={runs.map((one) => [one.name, `${one.name} (${one.task})`])}
            />
            <span class="quiet" role="status">
              {last ? `step ${last.step.toLocaleString("en")}, ` : ""}
              {run.ended ? "ended" : run.lines.length === 0 ? "nothing written yet" : "going on"}
            </span>
          </div>
          <Notice error={run.error} />
          <div class="charts">
            {charts.map((chart, n) => (
              <div key={chart.title} class={n === 0 ? "first" : ""}>
                <Chart {...chart} height={n === 0 ? 280 : 200} />
              </div>
            ))}
          </div>
          {run.config && (
            <details>
              <summary>Configuration</summary>
              <pre>{run.config}</pre>
            </details>
          )}
        </>
      )}
    </section>
  );
}
