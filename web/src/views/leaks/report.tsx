/** The report: findings, claimed and measured influence, and what was and was not tried. */

import { useMemo } from "preact/hooks";
import type { AuditAnswer } from "../../api.ts";
import { Legend } from "../../components/legend.tsx";
import { MapCanvas } from "../../components/mapCanvas.tsx";
import { positionLabels } from "../../map/labels.ts";
import type { CellPosition } from "../../map/matrix.ts";
import { Store } from "../../store.ts";
import { Findings } from "./findings.tsx";
import { influenceMaps } from "./influence.ts";

type Report = NonNullable<AuditAnswer["report"]>;

export function AuditReportView({ answer, report }: { answer: AuditAnswer; report: Report }) {
  return (
    <>
      {report.not_tried_summary && (
        <p class="prose">
          <b>Not tried:</b> {report.not_tried_summary}
        </p>
      )}
      <Findings findings={report.findings} />
      <InfluenceMaps answer={answer} />
      <div class="audit-lists">
        <LineList title="Tried" unit="code path" lines={report.paths} />
        <LineList title="Not tried" unit="code path or length" lines={report.not_tried} />
        <LineList title="Not checked" unit="line" lines={report.skipped} />
        <LineList title="Notes" unit="note" lines={report.notes} />
      </div>
    </>
  );
}

function LineList({ title, unit, lines }: { title: string; unit: string; lines?: string[] }) {
  if (lines === undefined || lines.length === 0) return null;
  return (
    <details>
      <summary>
        {title}: {lines.length}
      </summary>
      <ul class="lines" aria-label={`${title}, by ${unit}`}>
        {lines.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </details>
  );
}

function InfluenceMaps({ answer }: { answer: AuditAnswer }) {
  const maps = useMemo(() => influenceMaps(answer), [answer]);
  const labels = useMemo(() => positionLabels(Math.max(answer.rows ?? 0, answer.columns ?? 0)), [answer]);
  const hovered = useMemo(() => new Store<CellPosition>({ row: null, column: null }), []);
  if (maps === null) return null;
  const shared = {
    rows: labels,
    columns: labels,
    hovered,
    onHover: (cell: CellPosition | null) => hovered.set(cell ?? { row: null, column: null }),
    maxHeight: 440,
    showZoomButtons: false,
  };
  return (
    <div class="panels side-by-side two">
      <section class="panel" aria-label="Claimed">
        <h3>
          Claimed <span class="muted">which tokens may influence which outputs</span>
        </h3>
        <MapCanvas title="Claimed influence" data={maps.claimed} {...shared} />
      </section>
      <section class="panel" aria-label="Measured">
        <h3>
          Measured <span class="muted">which do, and how strongly</span>
        </h3>
        <MapCanvas title="Measured influence" data={maps.measured} {...shared} />
        <Legend low={maps.low} high={maps.high} />
      </section>
    </div>
  );
}
