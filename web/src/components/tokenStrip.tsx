/** A text as its tokens. What the hovered token attends to is filled, what attends to it is underlined. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Token } from "../api.ts";
import { type Cluster, clusterIndices, graphemeClusters, omitsSpaces } from "../graphemes.ts";
import type { Store } from "../store.ts";

export interface TokenHighlight {
  attendsTo: Float32Array | null; // weights of the hovered token, by token
  attendedBy: Float32Array | null; // weights on the hovered token, by token
}

interface Props {
  title: string;
  tokens: readonly Token[];
  hovered: Store<number | null>;
  highlight: Store<TokenHighlight>;
  onHover(token: number | null): void;
}

const NO_HIGHLIGHT: TokenHighlight = { attendsTo: null, attendedBy: null };
const MIN_WEIGHT = 0.004; // smaller ones are not highlighted

export function TokenStrip({ title, tokens, hovered, highlight, onHover }: Props) {
  const list = useRef<HTMLDivElement>(null);
  const clusters = useMemo(() => graphemeClusters(tokens), [tokens]);
  const clusterOfToken = useMemo(() => clusterIndices(clusters, tokens.length), [clusters, tokens]);

  useEffect(() => {
    let hoveredElement: HTMLElement | null = null;
    const markHovered = (token: number | null) => {
      const container = list.current; // null if the view was left before an answer came
      hoveredElement?.classList.remove("hovered");
      const element = token === null ? undefined : container?.children[clusterOfToken[token]];
      hoveredElement = (element as HTMLElement | undefined) ?? null;
      hoveredElement?.classList.add("hovered");
      if (hoveredElement?.id) container?.setAttribute("aria-activedescendant", hoveredElement.id);
      if (container?.matches(":focus-visible")) hoveredElement?.scrollIntoView({ block: "nearest" });
    };
    markHovered(hovered.get());
    return hovered.subscribe(markHovered);
  }, [hovered, clusterOfToken]);

  useEffect(() => {
    let highlighted: HTMLElement[] = [];
    const applyHighlight = ({ attendsTo, attendedBy }: TokenHighlight) => {
      for (const element of highlighted) {
        element.style.removeProperty("--attends-to");
        element.style.removeProperty("--attended-by");
      }
      highlighted = [];
      const container = list.current;
      if (container === null) return;
      clusters.forEach((cluster, n) => {
        const outgoing = maxWeight(attendsTo, cluster),
          incoming = maxWeight(attendedBy, cluster);
        if (outgoing < MIN_WEIGHT && incoming < MIN_WEIGHT) return;
        const element = container.children[n] as HTMLElement;
        element.style.setProperty("--attends-to", highlightOpacity(outgoing));
        element.style.setProperty("--attended-by", highlightOpacity(incoming));
        highlighted.push(element);
      });
    };
    applyHighlight(highlight.get());
    return highlight.subscribe(applyHighlight);
  }, [highlight, clusters]);

  const spans = useMemo(
    () =>
      clusters.map((cluster) => (
        <span
          key={cluster.first}
          role="option"
          id={`${title}-${cluster.first}`}
          data-first={cluster.first}
          aria-label={accessibleLabel(cluster)}
          class={cluster.special ? "token special" : "token"}
        >
          {showWhitespace(cluster.text)}
        </span>
      )),
    [clusters, title],
  ); // memoized: there may be thousands

  const onKeyDown = (event: KeyboardEvent) => {
    const current = hovered.get() ?? -1;
    const moves: Record<string, number> = {
      ArrowLeft: current - 1,
      ArrowRight: current + 1,
      ArrowUp: current - 10,
      ArrowDown: current + 10,
      Home: 0,
      End: tokens.length - 1,
    };
    if (event.key === "Escape") onHover(null);
    else if (event.key in moves) onHover(Math.max(0, Math.min(tokens.length - 1, moves[event.key])));
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const tokenAt = (event: Event) => {
    const element = (event.target as HTMLElement).closest<HTMLElement>("[data-first]");
    return element === null || !list.current!.contains(element) ? null : Number(element.dataset.first);
  };
  return (
    <section class="tokens">
      <h3>
        {title} <span class="muted">{tokens.length.toLocaleString("en")} tokens</span>
      </h3>
      <div
        ref={list}
        class={omitsSpaces(tokens) ? "token-strip spaced" : "token-strip"}
        role="listbox"
        aria-label={`Tokens of ${title}`}
        tabIndex={0}
        dir="auto"
        lang={detectLanguage(tokens)}
        onKeyDown={onKeyDown}
        onPointerOver={(event) => onHover(tokenAt(event))}
        onPointerLeave={() => onHover(null)}
        onFocus={() => {
          const isKeyboardFocus = list.current!.matches(":focus-visible");
          if (hovered.get() === null && tokens.length > 0 && isKeyboardFocus) onHover(0);
        }}
      >
        {spans}
      </div>
    </section>
  );
}

export const noHighlight = (): TokenHighlight => NO_HIGHLIGHT;

function maxWeight(weights: Float32Array | null, cluster: Cluster): number {
  let max = 0;
  if (weights === null) return max;
  for (let n = cluster.first; n < cluster.end; n++) max = Math.max(max, weights[n] ?? 0);
  return max;
}

/** The square root of a weight, so that small ones stay visible. */
function highlightOpacity(weight: number): string {
  return Math.sqrt(Math.min(1, weight)).toFixed(3);
}

/** A text with symbols for line breaks and tabs. */
export function showWhitespace(text: string): string {
  return text === "" ? "∅" : text.replace(/\r\n|\r|\n/g, "↵\n").replace(/\t/g, "⇥");
}

function accessibleLabel(cluster: Cluster): string {
  const count = cluster.end - cluster.first;
  const range = count > 1 ? `${cluster.first} to ${cluster.end - 1}` : String(cluster.first);
  return `${cluster.text.trim() || "space"}, token ${range}`;
}

/** The language for fonts and screen readers, where the script gives it away; undefined otherwise. */
export function detectLanguage(tokens: readonly { text: string }[]): string | undefined {
  const text = tokens
    .slice(0, 200)
    .map((token) => token.text)
    .join("");
  if (/\p{Script=Devanagari}/u.test(text)) return "hi";
  return undefined;
}
