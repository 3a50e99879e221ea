/** The views, as tabs. */

import { useEffect, useRef } from "preact/hooks";
import type { View } from "../api.ts";

export const VIEW_TITLES: Record<View, string> = {
  translate: "Translate",
  attention: "Attention",
  decoding: "Decoding",
  masks: "Masks",
  leaks: "Leaks",
  training: "Training",
  server: "Server",
};

interface Props {
  views: View[];
  view: View | undefined; // none before the model is loaded
  onSelect(view: View): void;
}

export function Tabs({ views, view, onSelect }: Props) {
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const selectedTab = list.current!.querySelector<HTMLElement>("[aria-selected=true]");
    if (selectedTab === null) return;
    list.current!.scrollLeft = selectedTab.offsetLeft - list.current!.offsetLeft - 40;
  }, [view]);
  const current = view === undefined ? 0 : views.indexOf(view);
  const onKeyDown = (event: KeyboardEvent) => {
    const moves: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      Home: -current,
      End: views.length - 1 - current,
    };
    if (!(event.key in moves)) return;
    const next = (current + moves[event.key] + views.length) % views.length;
    onSelect(views[next]);
    list.current!.querySelectorAll<HTMLElement>("[role=tab]")[next].focus();
    event.preventDefault();
  };
  return (
    <div ref={list} class="tabs" role="tablist" aria-label="Views" onKeyDown={onKeyDown}>
      {views.map((name, n) => (
        <button
          key={name}
          type="button"
          role="tab"
          id={`keepleft-tab-${name}`}
          aria-controls="keepleft-panel"
          aria-selected={name === view}
          tabIndex={n === current ? 0 : -1}
          aria-keyshortcuts={String(n + 1)}
          onClick={() => onSelect(name)}
        >
          {VIEW_TITLES[name]}
          <span class="tab-number" aria-hidden="true">
            {n + 1}
          </span>
        </button>
      ))}
    </div>
  );
}
