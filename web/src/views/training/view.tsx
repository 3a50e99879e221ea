/** The training view: the metrics of runs, and the results of `keepleft compare`. */

import { useMemo } from "preact/hooks";
import { Chart } from "../../components/chart.tsx";
import { Select, Status } from "../../components/controls.tsx";
import { useExplorer, useQuery, useUrlParam } from "../../shell/hooks.ts";
import { CompareResult } from "./compare.tsx";
import { runCharts, useRun } from "./useRun.ts";

export function TrainingView() {
  const { transport } = useExplorer();
  const { answer: compared, error } = useQuery("compare", transport.supports("compare") ? {} : null);
  return (
    <>
      {transport.supports("runs") && <Runs />}
      <section aria-label="Effect of the causal mask">
        <h2>Effect of the causal mask</h2>
        <Status error={error} />
        {compared !== null &&
          (compared.same || compared.masked ? (
            <CompareResult result={compared} />
          ) : (
            <p class="muted">
              No results yet. Run <code>keepleft compare</code>, which takes a minute or two.
            </p>
          ))}
      </section>
    </>
  );
}

function Runs() {
  const { answer, error, isLoading } = useQuery("runs", {});
  const [name, setName] = useUrlParam("run", "");
  const runs = answer?.runs ?? [];
  const selected = runs.find((run) => run.name === name) ?? runs[0] ?? null;
  const run = useRun(selected?.name ?? null);
  const charts = useMemo(() => runCharts(run.lines, selected?.task), [run.lines, selected?.task]);
  const last = run.lines.at(-1);
  return (
    <section aria-label="Runs">
      <h2>Runs</h2>
      <Status error={error} isLoading={isLoading && answer === null} />
      {answer !== null && runs.length === 0 && (
        <p class="muted">
          No runs found. Start one with <code>keepleft train</code>, or choose another folder with{" "}
          <code>--runs</code>.
        </p>
      )}
      {selected !== null && (
        <>
          <div class="bar">
            <Select
              label="Run"
              value={selected.name}
              onChange={setName}
              options={runs.map((item) => [item.name, `${item.name} (${item.task})`])}
            />
            <span class="muted" role="status">
              {last ? `step ${last.step.toLocaleString("en")}, ` : ""}
              {run.isFinished ? "finished" : run.lines.length === 0 ? "no metrics yet" : "running"}
            </span>
          </div>
          <Status error={run.error} />
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
