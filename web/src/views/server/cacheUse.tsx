/** The pages of the KV cache: in use, kept by the prefix cache, free. */

import type { CacheStatus } from "../../api.ts";
import { formatCount, formatPercent } from "./format.ts";
import { Meter } from "./meter.tsx";

export function CacheUse({ cache }: { cache: CacheStatus }) {
  const free = cache.pages - cache.used - cache.prefix;
  const hitRate = cache.prefix_hits / Math.max(1, cache.prefix_queries);
  const rows: [swatch: string, name: string, pages: number][] = [
    ["solid", "in use", cache.used],
    ["hatched", "prefix cache", cache.prefix],
    ["empty", "free", free],
  ];
  return (
    <section class="panel" aria-label="KV cache pages">
      <h3>
        KV cache{" "}
        <span class="muted">
          {formatCount(cache.pages)} pages of {cache.page_size} tokens
        </span>
      </h3>
      <Meter
        label="Pages"
        parts={[
          { name: "in use", value: cache.used },
          { name: "prefix cache", value: cache.prefix },
        ]}
        total={cache.pages}
      />
      <dl class="counts">
        {rows.map(([swatch, name, pages]) => (
          <div key={name}>
            <dt>
              <span class={`swatch ${swatch}`} aria-hidden="true" /> {name}
            </dt>
            <dd>{formatCount(pages)}</dd>
          </div>
        ))}
        <div>
          <dt>prefix cache hits</dt>
          <dd>
            {cache.prefix_queries === 0
              ? "–"
              : `${formatPercent(hitRate)} of ${formatCount(cache.prefix_queries)} pages`}
          </dd>
        </div>
        <div>
          <dt>preemptions</dt>
          <dd>{formatCount(cache.preemptions)}</dd>
        </div>
      </dl>
    </section>
  );
}
