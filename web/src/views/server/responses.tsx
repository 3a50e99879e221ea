/** Responses since the start, by the class of their status. */

import { formatCount } from "./format.ts";

const CLASSES: [key: string, name: string][] = [
  ["2xx", "answered"],
  ["4xx", "refused (4xx)"],
  ["429", "too many requests (429)"],
  ["5xx", "server errors (5xx)"],
];

export function Responses({ responses, failures }: { responses: Record<string, number>; failures: number }) {
  return (
    <section class="panel" aria-label="Responses">
      <h3>
        Responses <span class="muted">since the start</span>
      </h3>
      <dl class="counts">
        {CLASSES.map(([key, name]) => (
          <div key={key}>
            <dt>{name}</dt>
            <dd>{formatCount(responses[key] ?? 0)}</dd>
          </div>
        ))}
        <div class={failures > 0 ? "alert" : ""}>
          <dt>{failures > 0 && "▲ "}failed steps of the engine</dt>
          <dd>{formatCount(failures)}</dd>
        </div>
      </dl>
    </section>
  );
}
