/** The five views, as tabs. */

import { useEffect, useRef } from "preact/hooks";
import type { View } from "../api.ts";

export const NAMES: Record<View, string> = {
  attention: "Attention",
  decoding: "Decoding",
  masks: "Masks",
  leaks: "Leaks",
  training: "Training",
};

interface Props {
  views: View[];
  view: View;
  go(view: View): void;
}

export function Tabs({ views, view, go }: Props) {
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const shown = list.current!.querySelector<HTMLElement>("[aria-selected=true]");
    if (shown !== null) list.current!.scrollLeft = shown.offsetLeft - list.current!.offsetLeft - 40;
  }, [view]);
  const step = (event: KeyboardEvent) => {
    const moves: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      Home: -views.indexOf(view),
      End: views.length - 1 - views.indexOf(view),
    };
    if (!(event.key in moves)) return;
    const next = (views.indexOf(view) + moves[event.key] + views.length) % views.length;
    go(views[next]);
    list.current!.querySelectorAll<HTMLElement>("[role=tab]")[next].focus();
    event.preventDefault();
  };
  return (
    <div ref={list} class="tabs" role="tablist" aria-label="Views" onKeyDown={step}>
      {views.map((name, n) => (
        <button
          type="button"
          role="tab"
          id={`keepleft-tab-${name}`}
          aria-controls="keepleft-panel"
          aria-selected={name === view}
          tabIndex={name === view ? 0 : -1}
          aria-keyshortcuts={String(n + 1)}
          onClick={() => go(name)}
        >
          {NAMES[name]}
          <span class="digit" aria-hidden="true">
            {n + 1}
          </span>
        </button>
      ))}
    </div>
  );
}
