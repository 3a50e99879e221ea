/** What is asked and what is answered: the contract with keepleft.serving.explorer, as types. */

export interface Token {
  id: number;
  text: string;
  special: boolean;
}

export type Family = "encoder" | "decoder" | "encoder-decoder";
export type View = "attention" | "decoding" | "masks" | "leaks" | "training";
export type Kind = "self" | "masked" | "cross";
export type Side = "text" | "source";
/** One head, the mean of all, or what is left when layers are multiplied through. */
export type Head = number | "mean" | "rollout";

/** What is read: a text, and a source where the model is a pair. */
export interface Texts {
  text: string;
  source?: string;
}

export interface About {
  name: string;
  family: Family;
  parameters: number;
  dim: number;
  vocab: number;
  longest: number | null;
  attentions: { name: string; kind: Kind; layers: number; heads: number; mask: string }[];
  views: View[];
  example: Texts;
  version: string;
}

export interface Attended {
  name: string;
  kind: Kind;
  layers: number;
  heads: number;
  rows: number;
  columns: number;
  row_side: Side;
  column_side: Side;
  mask: string[];
}

export interface Attention {
  key: string;
  tokens: { text: Token[]; source?: Token[] };
  attentions: Attended[];
  shortened: string | null;
}

export interface Overview {
  rows: number;
  columns: number;
  step: number;
  map_u8: string;
  top: number;
  claim_bits?: string;
}

export interface Tile {
  row: number;
  column: number;
  rows: number;
  columns: number;
  map_u8: string;
  claim_bits: string;
}

export interface HeadSummary {
  entropy: number;
  distance: number;
  first: number;
  previous: number;
  itself: number;
  outside: number;
}

export interface Next {
  prompt: Token[];
  written: Token[];
  scores_f32: string;
  ends: number[];
  start: number;
}

export interface Written {
  tokens: Token[];
  logprobs: number[];
  ended: boolean;
}

export interface BeamNode {
  id: number;
  parent: number;
  token: Token;
  score: number;
  total: number;
  ended?: boolean;
}

export interface Ended {
  tokens: Token[];
  score: number;
  step: number;
}

export interface Beam {
  steps: BeamNode[][];
  finished: Ended[];
  best: { tokens: Token[]; score: number } | null;
}

export interface Alignment {
  source: Token[];
  written: Token[];
  weights_u8: string;
  rows: number;
  columns: number;
}

export interface MaskGiven {
  expression: string;
  length: number;
  padding: { left: number; right: number };
  packing: number[];
}

export interface MaskAnswer {
  mask: string;
  seen_bits: string;
  rows: number;
  columns: number;
  faults: string[];
  cost: { seen: number; all: number; share: number; words: string };
}

export interface Finding {
  kind: string;
  reader: number | null;
  source: number | null;
  size: number | null;
  path: string;
  module: string;
  message: string;
  line?: string;
  reproduce?: string;
}

export interface Leaks {
  state: "none" | "running" | "done";
  seconds: number;
  report?: {
    ok: boolean;
    verdict?: string;
    claim?: string;
    findings: Finding[];
    skipped?: string[];
    notes?: string[];
    checked?: string[];
    paths?: string[];
  } | null;
  claim_bits?: string;
  influence_f32?: string;
  rows?: number;
  columns?: number;
}

export interface Unmasked {
  tokens: Token[];
  with_f32: string;
  without_f32: string;
  reads: { rows: number; columns: number; before_u8: string; after_u8: string };
  words: string;
}

export interface RunListed {
  name: string;
  steps: number;
  modified: number | string;
  task: string;
}

/** A line of metrics.jsonl; not every line has every number. */
export interface Line {
  step: number;
  loss?: number;
  plain?: number;
  accuracy?: number;
  rate?: number;
  norm?: number;
  speed?: number;
  measures?: Record<string, number>;
  notes?: string[];
}

export interface Run {
  lines: Line[];
  from?: number; // of the first line; 0 after more were seen: the run was begun anew
  next: number;
  config: string;
  ended: boolean;
}

export interface Trial {
  mask: string;
  faults: string[];
  curve: [number, number][];
  loss: number;
  accuracy: number;
  honest: number;
  words: number;
  exact: number;
  samples: { english: string; french: string; written: string }[];
  seen: string;
}

export interface Compare {
  same?: {
    length: number;
    seconds: Record<string, number>;
    difference: Record<string, number>;
    ratio: Record<string, number>;
  }[];
  control?: { length: number; difference: Record<string, number> };
  masked?: Trial;
  unmasked?: Trial;
}

/** Each question, what goes with it, and what comes back. */
export interface Questions {
  about: [Record<string, never>, About];
  attention: [Texts, Attention];
  overview: [{ key: string; name: string; layer: number; head: Head; size: number }, Overview];
  tile: [{ key: string; name: string; layer: number; head: Head; row: number; column: number; size: number }, Tile];
  reads: [{ key: string; name: string; layer: number; head: Head; token: number; by: boolean }, { weights_f32: string }];
  summary: [{ key: string; name: string; layer: number }, { heads: HeadSummary[] }];
  next: [Texts & { tokens: number[]; unmasked: boolean }, Next];
  spell: [{ ids: number[]; before: number[] }, { tokens: Token[] }];
  vocabulary: [Record<string, never>, { words: string[] }];
  write: [Texts & { tokens: number[]; options: Record<string, number | boolean>; limit: number }, Written];
  beam: [Texts & { width: number; limit: number; length_penalty: number; early_stopping: boolean }, Beam];
  alignment: [{ source: string; tokens: number[]; layer: number | "mean"; head: number | "mean" }, Alignment];
  mask: [MaskGiven, MaskAnswer];
  leaks: [{ wait: boolean }, Leaks];
  unmasked: [Texts, Unmasked];
  runs: [Record<string, never>, { runs: RunListed[] }];
  run: [{ name: string; after: number }, Run];
  compare: [Record<string, never>, Compare];
}

export type Question = keyof Questions;
export type Given<Q extends Question> = Questions[Q][0];
export type Answer<Q extends Question> = Questions[Q][1];
