/** The tenants: of each API key what it has running and waiting, its share, and what it has used. */

import type { ServerStatus, TenantStatus } from "../../api.ts";
import { formatCount, formatRate, formatSeconds } from "./format.ts";
import type { Rates } from "./history.ts";

interface Props {
  status: ServerStatus;
  rates: Rates | null;
}

export function Tenants({ status, rates }: Props) {
  const { tenants, more_tenants: more, queue } = status;
  return (
    <section class="panel tenants" aria-label="Tenants">
      <h3>
        Tenants <span class="muted">a row for each API key, named by the first characters of its hash</span>
      </h3>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of tenants">
        <table>
          <colgroup span={2} />
          <colgroup span={6} />
          <colgroup span={2} />
          <colgroup span={4} />
          <thead>
            <tr>
              <td colSpan={2} />
              <th scope="colgroup" colSpan={6}>
                now
              </th>
              <th scope="colgroup" colSpan={2}>
                tokens per second
              </th>
              <th scope="colgroup" colSpan={4}>
                since the start
              </th>
            </tr>
            <tr>
              <th scope="col">key</th>
              <th scope="col">weight</th>
              <th scope="col">rows</th>
              <th scope="col">fair share</th>
              <th scope="col">paused</th>
              <th scope="col">waiting</th>
              <th scope="col">longest</th>
              <th scope="col">users</th>
              <th scope="col">prompts</th>
              <th scope="col">generated</th>
              <th scope="col">prompts</th>
              <th scope="col">generated</th>
              <th scope="col">requests</th>
              <th scope="col">429</th>
            </tr>
          </thead>
          <tbody>
            {tenants.map((tenant) => (
              <TenantRow key={tenant.label} {...{ tenant, rates, maxRows: queue.max_rows }} />
            ))}
          </tbody>
        </table>
      </div>
      {more > 0 && (
        <p class="muted">
          and {formatCount(more)} more {more === 1 ? "key" : "keys"} that have used less
        </p>
      )}
    </section>
  );
}

interface RowProps {
  tenant: TenantStatus;
  rates: Rates | null;
  maxRows: number | null;
}

function TenantRow({ tenant, rates, maxRows }: RowProps) {
  const rate = rates?.byTenant.get(tenant.label);
  const isActive = tenant.in_flight > 0;
  return (
    <tr class={isActive ? "" : "muted"}>
      <th scope="row">
        {tenant.label === "" ? "everybody" : <code>{tenant.label}</code>}
        {tenant.operator && tenant.label !== "" && <span class="muted"> operator</span>}
      </th>
      <td>{tenant.weight}</td>
      <td>
        <span class="row-bar">
          {maxRows !== null && <RowBar rows={tenant.running_rows / maxRows} share={tenant.share} />}
          {formatCount(tenant.running_rows)}
        </span>
      </td>
      <td>{tenant.share > 0 && maxRows !== null ? formatShare(tenant.share * maxRows) : "–"}</td>
      <td>{formatCount(tenant.paused)}</td>
      <td>{formatCount(tenant.waiting)}</td>
      <td>{tenant.oldest_wait > 0 ? formatSeconds(tenant.oldest_wait) : "–"}</td>
      <td>{formatCount(tenant.users)}</td>
      <td>{formatRate(rate?.prompt)}</td>
      <td>{formatRate(rate?.generation)}</td>
      <td>{formatCount(tenant.prompt_tokens)}</td>
      <td>{formatCount(tenant.generation_tokens)}</td>
      <td>{formatCount(tenant.requests)}</td>
      <td class={tenant.rate_limited > 0 ? "alert" : ""}>
        {tenant.rate_limited > 0 && "▲ "}
        {formatCount(tenant.rate_limited)}
      </td>
    </tr>
  );
}

/** The rows of a key as a bar, and its fair share as a line across it; both as fractions of all rows. */
function RowBar({ rows, share }: { rows: number; share: number }) {
  const percent = (fraction: number) => `${Math.min(100, 100 * fraction)}%`;
  return (
    <span class="meter" aria-hidden="true">
      <span class="fill" style={{ width: percent(rows) }} />
      {share > 0 && <span class="mark" style={{ left: percent(share) }} />}
    </span>
  );
}

function formatShare(rows: number): string {
  return String(Number(rows.toFixed(1)));
}
