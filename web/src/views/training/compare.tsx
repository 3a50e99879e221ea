/** The results of `keepleft compare`: parallel against step-by-step training, masked against unmasked. */

import { useMemo } from "preact/hooks";
import type { CompareAnswer } from "../../api.ts";
import { Chart, type Series } from "../../components/chart.tsx";

export function CompareResult({ result }: { result: CompareAnswer }) {
  const { same, control, masked, unmasked } = result;
  const timeSeries = useMemo<Series[]>(
    () =>
      Object.keys(same?.[0]?.seconds ?? {}).map((name) => ({
        name,
        points: (same ?? []).map((row): [number, number] => [row.length, row.seconds[name] * 1000]),
      })),
    [same],
  );
  const lossSeries = useMemo<Series[]>(
    () =>
      masked && unmasked
        ? [
            { name: "masked", points: masked.curve },
            { name: "unmasked", points: unmasked.curve },
          ]
        : [],
    [masked, unmasked],
  );
  return (
    <>
      {same && same.length > 0 && (
        <section aria-label="Parallel versus step-by-step training">
          <h3>Parallel versus step-by-step training</h3>
          <p class="prose">
            Teacher forcing processes the whole target in one pass. With the mask this gives the same
            gradients as going through it step by step, and is much faster.
          </p>
          <Chart
            title="Time of forward and backward pass"
            series={timeSeries}
            yLabel="milliseconds"
            xLabel="target length"
            logScale
          />
          <div class="scroll">
            <table>
              <thead>
                <tr>
                  <th scope="col">target length</th>
                  {Object.keys(same[0].ratio).map((name) => [
                    <th scope="col">{name}: slowdown</th>,
                    <th scope="col">gradient difference</th>,
                  ])}
                </tr>
              </thead>
              <tbody>
                {same.map((row) => (
                  <tr key={row.length}>
                    <th scope="row">{row.length}</th>
                    {Object.keys(row.ratio).map((name) => [
                      <td>{row.ratio[name].toFixed(1)}</td>,
                      <td>{row.difference[name]?.toExponential(1)}</td>,
                    ])}
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          {control && (
            <p class="muted">
              Without the mask, at length {control.length}, the gradients differ by{" "}
              {Object.values(control.difference)
                .map((d) => d.toPrecision(2))
                .join(" and ")}
              : one pass would train something else.
            </p>
          )}
        </section>
      )}
      {masked && unmasked && (
        <section aria-label="Masked versus unmasked training">
          <h3>Masked versus unmasked training</h3>
          <Chart title="Training loss" series={lossSeries} yLabel="loss per token" logScale />
          <div class="scroll">
            <table>
              <thead>
                <tr>
                  <th />
                  <th scope="col">masked</th>
                  <th scope="col">unmasked</th>
                </tr>
              </thead>
              <tbody>
                {TABLE_ROWS.map(([title, value]) => (
                  <tr key={title}>
                    <th scope="row">{title}</th>
                    <td>{value(masked)}</td>
                    <td>{value(unmasked)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <ul class="samples">
            {masked.samples.map((sample, n) => (
              <li key={n}>
                <p lang="en">{sample.english}</p>
                <p class="muted" lang="fr">
                  {sample.french}
                </p>
                <p>
                  <span class="muted">masked </span>
                  <span lang="fr">{sample.written || EMPTY_OUTPUT}</span>
                </p>
                <p>
                  <span class="muted">unmasked </span>
                  <span lang="fr">{unmasked.samples[n]?.written || EMPTY_OUTPUT}</span>
                </p>
              </li>
            ))}
          </ul>
          <p class="note">{masked.seen}</p>
          <p class="note">{unmasked.seen}</p>
        </section>
      )}
    </>
  );
}

const EMPTY_OUTPUT = "(empty)";
const formatPercent = (value: number) => `${(100 * value).toFixed(1)} %`;

const TABLE_ROWS: [string, (side: NonNullable<CompareAnswer["masked"]>) => string][] = [
  ["decoder mask", (side) => side.mask],
  ["held-out loss, teacher forcing", (side) => side.loss.toFixed(4)],
  ["held-out token accuracy, teacher forcing", (side) => formatPercent(side.accuracy)],
  ["held-out token accuracy, future removed", (side) => formatPercent(side.honest)],
  ["held-out word accuracy, generated", (side) => formatPercent(side.words)],
  ["held-out exact match, generated", (side) => formatPercent(side.exact)],
];
