/** Open connections, and the addresses that have the most of them. */

import type { ConnectionStatus } from "../../api.ts";
import { formatCount } from "./format.ts";
import { Meter } from "./meter.tsx";

export function Connections({ connections }: { connections: ConnectionStatus }) {
  const { addresses, top } = connections;
  return (
    <section class="panel" aria-label="Connections by address">
      <h3>
        Connections{" "}
        <span class="muted">
          from {formatCount(addresses)} {addresses === 1 ? "address" : "addresses"}, at most{" "}
          {formatCount(connections.limit_per_address)} each
        </span>
      </h3>
      <dl class="counts">
        {top.map(({ address, open }) => (
          <div key={address}>
            <dt>
              <code>{address || "local socket"}</code>
            </dt>
            <dd>{formatCount(open)}</dd>
            <dd>
              <Meter
                label={`Connections of ${address}`}
                parts={[{ name: "open", value: open }]}
                total={connections.limit_per_address}
              />
            </dd>
          </div>
        ))}
      </dl>
      {addresses > top.length && <p class="muted">and {formatCount(addresses - top.length)} more</p>}
    </section>
  );
}
