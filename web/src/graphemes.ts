/** Groups tokens into grapheme clusters for display: part of a character cannot be drawn on its own. */

import type { Token } from "./api.ts";

/** Tokens from `first` to before `end`, which are displayed as one. */
export interface Cluster {
  first: number;
  end: number;
  text: string;
  special: boolean;
}

const PARTIAL_BYTES = /(?:\\x[0-9a-f]{2})+$/; // bytes of an incomplete character, as keepleft escapes them
const STARTS_WITH_MARK = /^[\p{M}\u200d\u200c]/u; // a combining mark, or a joiner
// a zero-width joiner or a virama
const ENDS_WITH_JOINER = /[\u200d\u094d\u09cd\u0a4d\u0acd\u0b4d\u0ccd\u0d4d]$/u;
const STARTS_WITH_LETTER = /^\p{L}/u;
const segmenter =
  typeof Intl !== "undefined" && "Segmenter" in Intl
    ? new Intl.Segmenter(undefined, { granularity: "grapheme" })
    : null;

export function graphemeClusters(tokens: readonly Token[]): Cluster[] {
  const clusters: Cluster[] = [];
  tokens.forEach((token, n) => {
    const last = clusters.at(-1);
    if (last !== undefined && !token.special && !last.special && belongTogether(last.text, token.text)) {
      last.text = joinTexts(last.text, token.text);
      last.end = n + 1;
    } else {
      clusters.push({ first: n, end: n + 1, text: token.text, special: token.special });
    }
  });
  return clusters;
}

/** The index of each token's cluster. */
export function clusterIndices(clusters: readonly Cluster[], count: number): Int32Array {
  const indices = new Int32Array(count);
  clusters.forEach((cluster, n) => indices.fill(n, cluster.first, cluster.end));
  return indices;
}

/** Joins two texts. Escaped bytes of an incomplete character are replaced once the character is complete. */
function joinTexts(before: string, after: string): string {
  const complete = before.replace(PARTIAL_BYTES, "");
  return PARTIAL_BYTES.test(before) && !/^\\x/.test(after) ? complete + after : before + after;
}

function belongTogether(before: string, after: string): boolean {
  if (before === "" || after === "") return false;
  if (PARTIAL_BYTES.test(before)) return true;
  if (STARTS_WITH_MARK.test(after)) return true;
  if (ENDS_WITH_JOINER.test(before) && STARTS_WITH_LETTER.test(after)) return true;
  return sharesGrapheme(before, after);
}

/** True if a grapheme starts in one text and ends in the other: flags, emoji with skin tones, … */
function sharesGrapheme(before: string, after: string): boolean {
  const tail = before.slice(-16),
    head = after.slice(0, 16);
  if (segmenter === null) return false;
  if (!isBeyondLatin(tail.charCodeAt(tail.length - 1)) && !isBeyondLatin(head.charCodeAt(0))) return false;
  let position = 0;
  for (const { segment } of segmenter.segment(tail + head)) {
    if (position === tail.length) return false;
    position += segment.length;
    if (position > tail.length) return true;
  }
  return false;
}

function isBeyondLatin(code: number): boolean {
  return code > 0x2ff;
}

/** True for tokens without the spaces between words, as of word-level tokenizers; the page then adds them. */
export function omitsSpaces(tokens: readonly Token[]): boolean {
  const texts = tokens.filter((token) => !token.special).map((token) => token.text);
  const words = texts.filter((text) => /^[\p{L}\p{M}]{2,}$/u.test(text));
  return texts.length > 1 && words.length > texts.length / 2 && !texts.some((text) => /^\s|\s$/.test(text));
}

export function joinTokens(tokens: readonly Token[]): string {
  return graphemeClusters(tokens)
    .map((cluster) => cluster.text)
    .join(omitsSpaces(tokens) ? " " : "");
}

/** A token's text on one line, with symbols for line breaks, tabs and lone spaces. */
export function displayLabel(text: string): string {
  if (text === "") return "∅";
  const visible = text.replace(/\r\n|\r|\n/g, "↵").replace(/\t/g, "⇥");
  return /^ +$/.test(visible) ? "␣".repeat(visible.length) : visible.trim();
}
