/** The audit: what the mask claims beside what moves when a token is changed, and the findings in words. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { Finding, Leaks } from "../../api.ts";
import { Held } from "../../store.ts";
import { numbered } from "../../map/labels.ts";
import type { Point } from "../../map/matrix.ts";
import { Notice } from "../../components/controls.tsx";
import { Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { usePage } from "../../shell/hooks.ts";
import { RecordedSource } from "../../transport/snapshot.ts";
import { said } from "../../transport/transport.ts";
import { mapsOf } from "./influence.ts";

const AGAIN = 1000; // milliseconds

export function Audit() {
  const { source } = usePage();
  const [answer, setAnswer] = useState<Leaks | null>(null);
  const [error, setError] = useState("");
  const [going, setGoing] = useState(source instanceof RecordedSource); // there it costs nothing
  useEffect(() => {
    if (!going) return;
    let wait = 0,
      here = true;
    const look = () =>
      source.ask("leaks", { wait: false }).then(
        (found) => {
          if (!here) return;
          setAnswer(found);
          setError("");
          if (found.state === "running") wait = window.setTimeout(look, AGAIN);
          else setGoing(false);
        },
        (wrong: unknown) => {
          if (!here) return;
          setError(said(wrong));
          setGoing(false);
        },
      );
    void look();
    return () => {
      here = false;
      window.clearTimeout(wait);
    };
  }, [source, going]);
  return (
    <section aria-label="Audit">
      <h2>What is claimed, and what is measured</h2>
      <p class="prose">
        The mask says who may influence whom. The audit changes one token at a time, and looks which outputs move. Where
        something moves that may not, the model leaks.
      </p>
      {answer?.state !== "done" && (
        <div class="bar">
          <button type="button" disabled={going} onClick={() => setGoing(true)}>
            {going ? "Auditing …" : "Audit this model"}
          </button>
          {going && answer !== null && (
            <span class="quiet" role="status">
              {answer.seconds.toFixed(0)} s so far
            </span>
          )}
        </div>
      )}
      <Notice error={error} />
      {answer?.state === "done" && <Found answer={answer} />}
    </section>
  );
}

function Found({ answer }: { answer: Leaks }) {
  const maps = useMemo(() => mapsOf(answer), [answer]);
  const labels = useMemo(() => numbered(Math.max(answer.rows ?? 0, answer.columns ?? 0)), [answer]);
  const pointed = useMemo(() => new Held<Point>({ row: null, column: null }), []);
  const point = (at: Point | null) => pointed.set(at ?? { row: null, column: null });
  const report = answer.report;
  return (
    <>
      {report && (
        <p class={report.ok ? "verdict good" : "verdict alert"} role="status">
          {report.ok
            ? "✓ Clean: nothing moved that may not."
            : report.findings.length === 0
              ? "? Not everything could be checked."
              : `☒ ${report.findings.length === 1 ? "One leak" : `${report.findings.length} leaks`} found.`}
          <span class="quiet">
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
        <div class="panels several two">
          <section class="panel" aria-label="Claimed">
            <h3>
              Claimed <span class="quiet">who may influence whom</span>
            </h3>
            <MapCanvas
              title="Claimed influence"
              data={maps.claimed}
              rows={labels}
              columns={labels}
              pointed={pointed}
              onPoint={point}
              tallest={440}
              buttons={false}
            />
          </section>
          <section class="panel" aria-label="Measured">
            <h3>
              Measured <span class="quiet">who did, and by how much</span>
            </h3>
            <MapCanvas
              title="Measured influence"
              data={maps.measured}
              rows={labels}
              columns={labels}
              pointed={pointed}
              onPoint={point}
              tallest={440}
              buttons={false}
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
          <summary>Good to know: {report.notes.length}</summary>
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
            <p class="quiet">
              <code>{finding.line}</code>
            </p>
          )}
          {finding.reproduce && (
            <details>
              <summary>See it for yourself</summary>
              <pre>{finding.reproduce}</pre>
            </details>
          )}
        </li>
      ))}
    </ul>
  );
}
