/** A text as its tokens. The one that is pointed at lights up what it reads (filled) and who reads it (underlined). */

import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Token } from "../api.ts";
import { type Cluster, clusters, loose, membership } from "../graphemes.ts";
import type { Held } from "../store.ts";

export interface Light {
  reads: Float32Array | null; // weight for each token
  by: Float32Array | null;
}

interface Props {
  title: string;
  tokens: readonly Token[];
  pointed: Held<number | null>;
  light: Held<Light>;
  onPoint(token: number | null): void;
}

const DARK: Light = { reads: null, by: null };
const FAINT = 0.004; // less than that is not shown

export function Tokens({ title, tokens, pointed, light, onPoint }: Props) {
  const list = useRef<HTMLDivElement>(null);
  const groups = useMemo(() => clusters(tokens), [tokens]);
  const member = useMemo(() => membership(groups, tokens.length), [groups, tokens]);

  useEffect(() => {
    let before: HTMLElement | null = null;
    const mark = (token: number | null) => {
      const box = list.current; // none: an answer came just as the view was left
      before?.classList.remove("pointed");
      before = token === null ? null : ((box?.children[member[token]] as HTMLElement | undefined) ?? null);
      before?.classList.add("pointed");
      if (before?.id) box?.setAttribute("aria-activedescendant", before.id);
      if (box?.matches(":focus-visible")) before?.scrollIntoView({ block: "nearest" });
    };
    mark(pointed.get());
    return pointed.listen(mark);
  }, [pointed, member]);

  useEffect(() => {
    let lit: HTMLElement[] = [];
    const shine = ({ reads, by }: Light) => {
      for (const element of lit) {
        element.style.removeProperty("--reads");
        element.style.removeProperty("--by");
      }
      lit = [];
      const box = list.current;
      if (box === null) return;
      groups.forEach((group, n) => {
        const read = most(reads, group),
          back = most(by, group);
        if (read < FAINT && back < FAINT) return;
        const element = box.children[n] as HTMLElement;
        element.style.setProperty("--reads", strength(read));
        element.style.setProperty("--by", strength(back));
        lit.push(element);
      });
    };
    shine(light.get());
    return light.listen(shine);
  }, [light, groups]);

  const spans = useMemo(
    () =>
      groups.map((group) => (
        <span
          key={group.first}
          role="option"
          id={`${title}-${group.first}`}
          data-first={group.first}
          aria-label={spoken(group)}
          class={group.special ? "token special" : "token"}
        >
          {printed(group.text)}
        </span>
      )),
    [groups, title],
  ); // thousands of them: not made anew for every change around them

  const step = (event: KeyboardEvent) => {
    const now = pointed.get() ?? -1;
    const moves: Record<string, number> = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      ArrowUp: now - 10,
      ArrowDown: now + 10,
      Home: 0,
      End: tokens.length - 1,
    };
    if (event.key === "Escape") onPoint(null);
    else if (event.key in moves) onPoint(Math.max(0, Math.min(tokens.length - 1, moves[event.key])));
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const under = (event: Event) => {
    const element = (event.target as HTMLElement).closest<HTMLElement>("[data-first]");
    return element === null || !list.current!.contains(element) ? null : Number(element.dataset.first);
  };
  return (
    <section class="tokens">
      <h3>
        {title} <span class="quiet">{tokens.length.toLocaleString("en")} tokens</span>
      </h3>
      <div
        ref={list}
        class={loose(tokens) ? "strip loose" : "strip"}
        role="listbox"
        aria-label={`Tokens of ${title}`}
        tabIndex={0}
        dir="auto"
        lang={tongue(tokens)}
        onKeyDown={step}
        onPointerOver={(event) => onPoint(under(event))}
        onPointerLeave={() => onPoint(null)}
        onFocus={() => {
          if (pointed.get() === null && tokens.length > 0 && list.current!.matches(":focus-visible")) onPoint(0);
        }}
      >
        {spans}
      </div>
    </section>
  );
}

export const unlit = (): Light => DARK;

function most(weights: Float32Array | null, group: Cluster): number {
  let out = 0;
  if (weights !== null) for (let n = group.first; n < group.end; n++) out = Math.max(out, weights[n] ?? 0);
  return out;
}

/** Small weights should still be seen: by the root of their size. */
function strength(weight: number): string {
  return Math.sqrt(Math.min(1, weight)).toFixed(3);
}

/** With signs for what is not seen otherwise. */
export function printed(text: string): string {
  return text === "" ? "∅" : text.replace(/\r\n|\r|\n/g, "↵\n").replace(/\t/g, "⇥");
}

function spoken(group: Cluster): string {
  const parts = group.end - group.first;
  return `${group.text.trim() || "space"}, token ${group.first}${parts > 1 ? ` to ${group.end - 1}` : ""}`;
}

/** Enough for the right letters and the right voice; what it cannot tell it does not say. */
export function tongue(tokens: readonly { text: string }[]): string | undefined {
  const text = tokens
    .slice(0, 200)
    .map((token) => token.text)
    .join("");
  if (/\p{Script=Devanagari}/u.test(text)) return "hi";
  return undefined;
}
