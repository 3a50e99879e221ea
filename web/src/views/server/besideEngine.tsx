/** Work beside the engine: explorer questions, grammars, tokenizing. */

import type { ServerStatus, WorkName } from "../../api.ts";
import { formatCount } from "./format.ts";

const WORK_NAMES: Record<WorkName, string> = {
  questions: "explorer questions",
  audits: "audits",
  templates: "chat templates",
  grammars: "grammars",
  tokenizing: "slow tokenizers",
  preparation: "tokenizing",
  validation: "reading bodies",
  responses: "writing responses",
};

export function BesideEngine({ work }: { work: ServerStatus["beside_engine"] }) {
  return (
    <section class="panel" aria-label="Beside the engine">
      <table class="work">
        <thead>
          <tr>
            <th scope="col">
              <h3>Beside the engine</h3>
            </th>
            <th scope="col">running</th>
            <th scope="col">waiting</th>
          </tr>
        </thead>
        <tbody>
          {work.map(({ name, running, waiting }) => (
            <tr key={name}>
              <th scope="row">{WORK_NAMES[name]}</th>
              <td>{formatCount(running)}</td>
              <td>{formatCount(waiting)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
