/** The seven checks as they come in, and what is being tried. */

import type { AuditAnswer, AuditCheck, AuditProgress, CheckStatus } from "../../api.ts";

const SYMBOLS: Record<CheckStatus, string> = {
  waiting: "·",
  running: "▸",
  clean: "✓",
  leak: "☒",
  unchecked: "?",
  "not applicable": "–",
};
const SUBJECTS: Record<string, string> = {
  future: "tokens that an output must not see",
  padding: "content and amount of padding",
  packing: "other texts packed into the same row",
  batch: "other rows of the batch",
  cache: "decoding with a KV cache against one pass",
  nan: "NaN where a query sees nothing",
  labels: "which output the loss compares with which label",
};

export function ChecksPanel({ answer, progress }: { answer: AuditAnswer; progress: AuditProgress }) {
  const isRunning = answer.state === "running" || answer.state === "stopping";
  return (
    <section class="panel audit-progress" aria-label="Checks">
      {isRunning ? <ProgressLine answer={answer} progress={progress} /> : <Verdict answer={answer} />}
      <ul class="checks">
        {progress.checks.map((check) => (
          <CheckRow key={check.name} check={check} isEnded={!isRunning} />
        ))}
      </ul>
    </section>
  );
}

function Verdict({ answer }: { answer: AuditAnswer }) {
  const { report } = answer;
  if (!report) {
    return (
      <p class="verdict" role="status">
        Stopped: there is no verdict. <span class="muted">This is what was found so far.</span>
      </p>
    );
  }
  const numFindings = report.findings.length;
  return (
    <p class={report.ok ? "verdict good" : "verdict alert"} role="status">
      {report.ok
        ? "✓ No leaks: every change is allowed by the mask."
        : numFindings === 0
          ? "? Not everything could be checked."
          : `☒ ${numFindings === 1 ? "One leak" : `${numFindings} leaks`} found.`}{" "}
      <span class="muted">
        {answer.budget} budget, {answer.seconds.toFixed(1)} s
        {report.claim ? (
          <>
            , claim <code>{report.claim}</code>
          </>
        ) : null}
      </span>
    </p>
  );
}

function ProgressLine({ answer, progress }: { answer: AuditAnswer; progress: AuditProgress }) {
  const percent = Math.round(100 * progress.fraction);
  const pass = progress.num_passes > 1 ? `pass ${progress.pass_number} of ${progress.num_passes}` : "";
  const facts = [`${answer.seconds.toFixed(0)} s`, `${progress.calls.toLocaleString("en")} calls`, pass];
  return (
    <>
      <div
        class="meter"
        role="progressbar"
        aria-label="Audit"
        aria-valuenow={percent}
        aria-valuemin={0}
        aria-valuemax={100}
      >
        <span class="fill" style={{ width: `${percent}%` }} />
      </div>
      <p class="trying">
        <span>
          {progress.check === "" ? (
            "First calls of the model …"
          ) : (
            <>
              <b>{progress.check}</b> {progress.path}
            </>
          )}
        </span>
        <span class="muted">{facts.filter(Boolean).join(" · ")}</span>
      </p>
    </>
  );
}

function CheckRow({ check, isEnded }: { check: AuditCheck; isEnded: boolean }) {
  // what an audit had not reached when it ended is neither waiting nor running
  const isUnreached = isEnded && (check.status === "waiting" || check.status === "running");
  const status = isUnreached ? "unchecked" : check.status;
  const paths = check.num_paths === 1 ? "1 path" : `${check.num_paths} paths`;
  const details = check.reason || (check.num_paths > 0 ? paths : SUBJECTS[check.name]);
  return (
    <li class={`check ${status.replace(" ", "-")}`}>
      <span class="symbol" aria-hidden="true">
        {SYMBOLS[status]}
      </span>
      <span class="check-name">{check.name}</span>
      <span class="check-status">{isUnreached ? "not reached" : status}</span>
      <span class="check-details">{details}</span>
    </li>
  );
}
