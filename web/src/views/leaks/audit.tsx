/** The audit: claimed and measured influence, and the findings. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { AuditAnswer, Finding } from "../../api.ts";
import { Status } from "../../components/controls.tsx";
import { Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { positionLabels } from "../../map/labels.ts";
import type { CellPosition } from "../../map/matrix.ts";
import { useExplorer } from "../../shell/hooks.ts";
import { Store } from "../../store.ts";
import { SnapshotTransport } from "../../transport/snapshot.ts";
import { errorMessage } from "../../transport/transport.ts";
import { influenceMaps } from "./influence.ts";

const POLL_MS = 1000;

export function Audit() {
  const { transport } = useExplorer();
  const [answer, setAnswer] = useState<AuditAnswer | null>(null);
  const [error, setError] = useState("");
  // in a snapshot the audit is already done
  const [isRunning, setIsRunning] = useState(transport instanceof SnapshotTransport);
  useEffect(() => {
    if (!isRunning) return;
    let timer = 0,
      isActive = true;
    const poll = () =>
      transport.ask("audit", { wait: false }).then(
        (status) => {
          if (!isActive) return;
          setAnswer(status);
          setError("");
          if (status.state === "running") timer = window.setTimeout(poll, POLL_MS);
          else setIsRunning(false);
        },
        (reason: unknown) => {
          if (!isActive) return;
          setError(errorMessage(reason));
          setIsRunning(false);
        },
      );
    void poll();
    return () => {
      isActive = false;
      window.clearTimeout(timer);
    };
  }, [transport, isRunning]);
  return (
    <section aria-label="Audit">
      <h2>Claimed and measured influence</h2>
      <p class="prose">
        The mask defines which tokens may influence which outputs. The audit changes one token at a time and
        measures which outputs change. A change that the mask forbids is a leak.
      </p>
      {answer?.state !== "done" && (
        <div class="bar">
          <button type="button" disabled={isRunning} onClick={() => setIsRunning(true)}>
            {isRunning ? "Auditing …" : "Audit this model"}
          </button>
          {isRunning && answer !== null && (
            <span class="muted" role="status">
              {answer.seconds.toFixed(0)} s so far
            </span>
          )}
        </div>
      )}
      <Status error={error} />
      {answer?.state === "done" && <AuditResult answer={answer} />}
    </section>
  );
}

function AuditResult({ answer }: { answer: AuditAnswer }) {
  const maps = useMemo(() => influenceMaps(answer), [answer]);
  const labels = useMemo(() => positionLabels(Math.max(answer.rows ?? 0, answer.columns ?? 0)), [answer]);
  const hovered = useMemo(() => new Store<CellPosition>({ row: null, column: null }), []);
  const onHover = (cell: CellPosition | null) => hovered.set(cell ?? { row: null, column: null });
  const report = answer.report;
  return (
    <>
      {report && (
        <p class={report.ok ? "verdict good" : "verdict alert"} role="status">
          {report.ok
            ? "✓ No leaks: every change is allowed by the mask."
            : report.findings.length === 0
              ? "? Not everything could be checked."
              : `☒ ${report.findings.length === 1 ? "One leak" : `${report.findings.length} leaks`} found.`}
          <span class="muted">
            {" "}
            {answer.seconds.toFixed(1)} s
            {report.claim ? (
              <>
                , claim <code>{report.claim}</code>
              </>
            ) : null}
          </span>
        </p>
      )}
      {maps !== null && (
        <div class="panels side-by-side two">
          <section class="panel" aria-label="Claimed">
            <h3>
              Claimed <span class="muted">which tokens may influence which outputs</span>
            </h3>
            <MapCanvas
              title="Claimed influence"
              data={maps.claimed}
              rows={labels}
              columns={labels}
              hovered={hovered}
              onHover={onHover}
              maxHeight={440}
              showZoomButtons={false}
            />
          </section>
          <section class="panel" aria-label="Measured">
            <h3>
              Measured <span class="muted">which do, and how strongly</span>
            </h3>
            <MapCanvas
              title="Measured influence"
              data={maps.measured}
              rows={labels}
              columns={labels}
              hovered={hovered}
              onHover={onHover}
              maxHeight={440}
              showZoomButtons={false}
            />
            <Legend low={maps.low} high={maps.high} />
          </section>
        </div>
      )}
      {report && <Findings findings={report.findings} />}
      {report?.skipped && report.skipped.length > 0 && (
        <details>
          <summary>Not checked: {report.skipped.length}</summary>
          <ul>
            {report.skipped.map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
        </details>
      )}
      {report?.notes && report.notes.length > 0 && (
        <details>
          <summary>Notes: {report.notes.length}</summary>
          <ul>
            {report.notes.map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
        </details>
      )}
    </>
  );
}

function Findings({ findings }: { findings: Finding[] }) {
  if (findings.length === 0) return null;
  return (
    <ul class="findings">
      {findings.map((finding, n) => (
        <li key={n}>
          <p>
            <b>{finding.kind}</b>
            {finding.module && (
              <>
                {" "}
                in <code>{finding.module}</code>
              </>
            )}
            : {finding.message}
          </p>
          {finding.line && (
            <p class="muted">
              <code>{finding.line}</code>
            </p>
          )}
          {finding.reproduce && (
            <details>
              <summary>Reproduce</summary>
              <pre>{finding.reproduce}</pre>
            </details>
          )}
        </li>
      ))}
    </ul>
  );
}
