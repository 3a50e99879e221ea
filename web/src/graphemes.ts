/** Tokens as letters that a reader knows: parts of one letter are shown together, since half a letter cannot be drawn. */

import type { Token } from "./api.ts";

/** Tokens `first` up to and without `end`, which are one piece of text to the eye. */
export interface Cluster {
  first: number;
  end: number;
  text: string;
  special: boolean;
}

const HALF = /(?:\\x[0-9a-f]{2})+$/; // bytes of a letter that is not whole yet, as keepleft spells them
const LEANS = /^[\p{M}\u200d\u200c]/u; // a mark that sits on the letter before it
const BINDS = /[\u200d\u094d\u09cd\u0a4d\u0acd\u0b4d\u0ccd\u0d4d]$/u; // a joiner or virama: the next letter belongs to this one

export function clusters(tokens: readonly Token[]): Cluster[] {
  const out: Cluster[] = [];
  tokens.forEach((token, n) => {
    const last = out.at(-1);
    if (last !== undefined && !token.special && !last.special && bound(last.text, token.text)) {
      last.text = joined(last.text, token.text);
      last.end = n + 1;
    } else {
      out.push({ first: n, end: n + 1, text: token.text, special: token.special });
    }
  });
  return out;
}

/** The cluster that each token is in. */
export function membership(groups: readonly Cluster[], count: number): Int32Array {
  const out = new Int32Array(count);
  groups.forEach((group, n) => out.fill(n, group.first, group.end));
  return out;
}

/** Bytes that wait for the rest of their letter are left out once it has come. */
function joined(before: string, after: string): string {
  const whole = before.replace(HALF, "");
  return HALF.test(before) && !/^\\x/.test(after) ? whole + after : before + after;
}

function bound(before: string, after: string): boolean {
  if (before === "" || after === "") return false;
  if (HALF.test(before)) return true;
  if (LEANS.test(after)) return true;
  if (BINDS.test(before) && LETTER.test(after)) return true;
  return straddled(before, after);
}

const LETTER = /^\p{L}/u;
const segmenter =
  typeof Intl !== "undefined" && "Segmenter" in Intl ? new Intl.Segmenter(undefined, { granularity: "grapheme" }) : null;

/** Is there a grapheme that begins in one text and ends in the other (flags, emoji with tones, …)? */
function straddled(before: string, after: string): boolean {
  const tail = before.slice(-16),
    head = after.slice(0, 16);
  if (segmenter === null || (!beyond(tail.charCodeAt(tail.length - 1)) && !beyond(head.charCodeAt(0)))) return false;
  let at = 0;
  for (const { segment } of segmenter.segment(tail + head)) {
    if (at === tail.length) return false;
    at += segment.length;
    if (at > tail.length) return true;
  }
  return false;
}

function beyond(code: number): boolean {
  return code > 0x2ff;
}

/** Do these tokens leave out the spaces between words, as tokenizers of whole words do? Then the page puts them apart. */
export function loose(tokens: readonly Token[]): boolean {
  const own = tokens.filter((token) => !token.special).map((token) => token.text);
  const words = own.filter((text) => /^[\p{L}\p{M}]{2,}$/u.test(text));
  return own.length > 1 && words.length > own.length / 2 && !own.some((text) => /^\s|\s$/.test(text));
}

/** Tokens as one text. */
export function together(tokens: readonly Token[]): string {
  return clusters(tokens)
    .map((group) => group.text)
    .join(loose(tokens) ? " " : "");
}

/** As a reader sees it in one line: spaces and line ends by their signs where they are all there is. */
export function label(text: string): string {
  if (text === "") return "∅";
  const shown = text.replace(/\r\n|\r|\n/g, "↵").replace(/\t/g, "⇥");
  return /^ +$/.test(shown) ? "␣".repeat(shown.length) : shown.trim();
}
