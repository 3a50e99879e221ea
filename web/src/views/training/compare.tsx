/** What `keepleft compare` found: one pass against the loop, and training with the mask against training without it. */

import { useMemo } from "preact/hooks";
import type { Compare } from "../../api.ts";
import { Chart, type Series } from "../../components/chart.tsx";

export function Compared({ found }: { found: Compare }) {
  const { same, control, masked, unmasked } = found;
  const times = useMemo<Series[]>(
    () =>
      Object.keys(same?.[0]?.seconds ?? {}).map((name) => ({
        name,
        points: (same ?? []).map((row): [number, number] => [row.length, row.seconds[name] * 1000]),
      })),
    [same],
  );
  const learned = useMemo<Series[]>(
    () =>
      masked && unmasked
        ? [
            { name: "with the mask", points: masked.curve },
            { name: "without it", points: unmasked.curve },
          ]
        : [],
    [masked, unmasked],
  );
  return (
    <>
      {same && same.length > 0 && (
        <section aria-label="One pass against the loop">
          <h3>One pass against the loop</h3>
          <p class="prose">
            Teacher forcing shows the model the whole target at once. The mask makes that the same as writing it step by step,
            and much quicker.
          </p>
          <Chart title="Time of forward and backward" series={times} y="milliseconds" x="target length" log />
          <div class="scroll">
            <table>
              <thead>
                <tr>
                  <th scope="col">target</th>
                  {Object.keys(same[0].ratio).map((name) => [
                    <th scope="col">{name}: times the time</th>,
                    <th scope="col">gradients differ by</th>,
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
            <p class="quiet">
              Without the mask, at length {control.length}, the gradients differ by{" "}
              {Object.values(control.difference)
                .map((d) => d.toPrecision(2))
                .join(" and ")}
              : then one pass learns something else.
            </p>
          )}
        </section>
      )}
      {masked && unmasked && (
        <section aria-label="With the mask against without">
          <h3>With the mask against without</h3>
          <Chart title="Training loss" series={learned} y="loss per token" log />
          <div class="scroll">
            <table>
              <thead>
                <tr>
                  <th />
                  <th scope="col">with the mask</th>
                  <th scope="col">without it</th>
                </tr>
              </thead>
              <tbody>
                {ROWS.map(([words, value]) => (
                  <tr key={words}>
                    <th scope="row">{words}</th>
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
                <p class="quiet" lang="fr">
                  {sample.french}
                </p>
                <p>
                  <span class="quiet">with the mask </span>
                  <span lang="fr">{sample.written || NOTHING}</span>
                </p>
                <p>
                  <span class="quiet">without it </span>
                  <span lang="fr">{unmasked.samples[n]?.written || NOTHING}</span>
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

const NOTHING = "(nothing: it ends at once)";
const share = (value: number) => `${(100 * value).toFixed(1)} %`;

const ROWS: [string, (side: NonNullable<Compare["masked"]>) => string][] = [
  ["mask of the decoder", (side) => side.mask],
  ["held out, as in training: loss", (side) => side.loss.toFixed(4)],
  ["held out, as in training: tokens right", (side) => share(side.accuracy)],
  ["held out, future cut off: tokens right", (side) => share(side.honest)],
  ["held out, written alone: words right", (side) => share(side.words)],
  ["held out, written alone: sentences right", (side) => share(side.exact)],
];
