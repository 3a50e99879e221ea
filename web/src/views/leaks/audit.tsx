/** The audit: budgets, the checks as they come in, and the report. */

import { useEffect, useId } from "preact/hooks";
import type { AuditAnswer, Budget } from "../../api.ts";
import { Status } from "../../components/controls.tsx";
import { useExplorer } from "../../shell/hooks.ts";
import { useStore } from "../../store.ts";
import { SnapshotTransport } from "../../transport/snapshot.ts";
import { Findings } from "./findings.tsx";
import { ChecksPanel } from "./checksPanel.tsx";
import { AuditReportView } from "./report.tsx";

const BUDGETS: readonly { value: Budget; name: string; time: string; scope: string }[] = [
  { value: "quick", name: "Quick", time: "seconds", scope: "the main code paths and a few lengths" },
  { value: "standard", name: "Standard", time: "about a minute", scope: "every code path, more lengths" },
  { value: "full", name: "Full", time: "minutes, here at most ten", scope: "every path and length" },
];

export function Audit() {
  const { transport, auditMonitor } = useExplorer();
  const { budget, answer, error, isRunning } = useStore(auditMonitor.state);
  const group = useId();
  const isSnapshot = transport instanceof SnapshotTransport;
  useEffect(() => {
    if (isSnapshot) void auditMonitor.show();
  }, [auditMonitor, isSnapshot]);
  return (
    <section aria-label="Audit">
      <h2>Audit</h2>
      <p class="prose">
        The mask defines which tokens may influence which outputs. The audit changes what the model may not
        see, in the ways that the model can be called, and measures which outputs change. A change that the
        mask forbids is a leak.
      </p>
      {!isSnapshot && (
        <>
          <div class="budgets" role="radiogroup" aria-label="Budget">
            {BUDGETS.map(({ value, name, time, scope }) => (
              <label key={value} class={value === budget ? "selected" : ""}>
                <input
                  type="radio"
                  name={group}
                  value={value}
                  checked={value === budget}
                  disabled={isRunning}
                  onChange={() => auditMonitor.choose(value)}
                />
                <span class="budget-name">{name}</span> <span class="budget-time">{time}</span>
                <span class="budget-scope">{scope}</span>
              </label>
            ))}
          </div>
          <div class="bar">
            {isRunning ? (
              <button type="button" class="plain" onClick={() => auditMonitor.stop()}>
                Stop
              </button>
            ) : (
              <button type="button" onClick={() => auditMonitor.start()}>
                Audit this model
              </button>
            )}
          </div>
        </>
      )}
      <Status error={error} />
      {answer !== null && <AuditAnswerView answer={answer} />}
    </section>
  );
}

function AuditAnswerView({ answer }: { answer: AuditAnswer }) {
  const { state, progress } = answer;
  if (state === "waiting") {
    return (
      <p class="muted busy" role="status">
        Another audit of this model is running, with the budget {answer.running_budget}. This one is next.
      </p>
    );
  }
  return (
    <>
      {progress !== undefined && <ChecksPanel answer={answer} progress={progress} />}
      {answer.report ? (
        <AuditReportView answer={answer} report={answer.report} />
      ) : (
        <Findings findings={progress?.findings ?? []} />
      )}
    </>
  );
}
