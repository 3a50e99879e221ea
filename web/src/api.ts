/** The JSON protocol of keepleft.serving.explorer: parameters and answer of each question, as types. */

export interface Token {
  id: number;
  text: string;
  special: boolean;
}

export type Family = "encoder" | "decoder" | "encoder-decoder";
export type View = "translate" | "attention" | "decoding" | "masks" | "leaks" | "training" | "server";
export type AttentionKind = "self" | "masked" | "cross";
export type Side = "text" | "source";
/** One head, the mean of all heads, or the attention rollout up to a layer. */
export type Head = number | "mean" | "rollout";

/** The model's input: a text, and a source for an encoder-decoder. */
export interface Texts {
  text: string;
  source?: string;
}

export interface ModelInfo {
  name: string;
  family: Family;
  parameters: number;
  dim: number;
  vocab_size: number;
  max_positions: number | null;
  attentions: { name: string; kind: AttentionKind; layers: number; heads: number; mask: string }[];
  views: View[];
  languages: Record<string, string>; // that a multilingual translator writes: names by code
  example: Texts;
  version: string;
}

export interface AttentionInfo {
  name: string;
  kind: AttentionKind;
  layers: number;
  heads: number;
  rows: number;
  columns: number;
  row_side: Side;
  column_side: Side;
  mask: string[];
}

export interface AttentionAnswer {
  key: string;
  tokens: { text: Token[]; source?: Token[] };
  attentions: AttentionInfo[];
  truncated: string | null;
}

export interface OverviewAnswer {
  rows: number;
  columns: number;
  cell_size: number;
  map_u8: string;
  max_weight: number;
  claim_bits?: string;
}

export interface TileAnswer {
  row: number;
  column: number;
  rows: number;
  columns: number;
  map_u8: string;
  claim_bits: string;
}

export interface HeadStats {
  entropy: number;
  distance: number;
  first: number;
  previous: number;
  itself: number;
  outside: number;
}

export interface NextTokenAnswer {
  prompt: Token[];
  new_tokens: Token[];
  logits_f32: string;
  eos_ids: number[];
  decoder_start_token_id: number;
}

export interface ContinueAnswer {
  tokens: Token[];
  logprobs: number[];
  finished: boolean;
}

export interface BeamNode {
  id: number;
  parent: number;
  token: Token;
  logprob: number;
  score: number;
  finished?: boolean;
}

export interface FinishedHypothesis {
  tokens: Token[];
  score: number;
  step: number;
}

export interface BeamAnswer {
  steps: BeamNode[][];
  finished: FinishedHypothesis[];
  best: { tokens: Token[]; score: number } | null;
}

export interface AlignmentAnswer {
  source: Token[];
  target: Token[];
  weights_u8: string;
  rows: number;
  columns: number;
}

export interface MaskParams {
  expression: string;
  length: number;
  padding: { left: number; right: number };
  packing: number[];
}

export interface TranslateParams {
  text: string;
  to: string;
}

export interface TranslatedSentence {
  source: string;
  target: string;
  input: string; // the sentence with its language tag, for the other views
}

export interface TranslateAnswer {
  text: string;
  sentences: TranslatedSentence[];
  warnings: string[]; // about the language of the text
}

export interface MaskAnswer {
  mask: string;
  visible_bits: string;
  rows: number;
  columns: number;
  faults: string[];
  cost: { visible: number; total: number; fraction: number; note: string };
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
  also?: string[]; // further code paths with the same leak
}

export type Budget = "quick" | "standard" | "full";

export interface AuditParams {
  budget?: Budget;
  action?: "poll" | "start" | "stop";
  wait?: boolean;
  client?: string; // an audit ends when all clients that watch it have left
}

export type CheckStatus = "waiting" | "running" | "clean" | "leak" | "unchecked" | "not applicable";

export interface AuditCheck {
  name: string;
  status: CheckStatus;
  num_paths: number;
  reason: string; // why it was not made
}

export interface AuditProgress {
  fraction: number; // an estimate
  check: string;
  path: string;
  pass_number: number;
  num_passes: number;
  calls: number;
  checks: AuditCheck[];
  findings: Finding[]; // until there is a report
}

export interface AuditAnswer {
  state: "none" | "waiting" | "running" | "stopping" | "stopped" | "done";
  budget: Budget;
  seconds: number;
  running_budget?: Budget | null; // of the audit that is waited for
  progress?: AuditProgress;
  report?: {
    ok: boolean;
    verdict?: string;
    claim?: string;
    findings: Finding[];
    skipped?: string[];
    notes?: string[];
    checked?: string[];
    paths?: string[];
    not_tried?: string[];
    not_tried_summary?: string;
  } | null;
  claim_bits?: string;
  influence_f32?: string;
  rows?: number;
  columns?: number;
}

export interface UnmaskedAnswer {
  tokens: Token[];
  masked_loss_f32: string;
  unmasked_loss_f32: string;
  maps: { rows: number; columns: number; masked_u8: string; unmasked_u8: string };
  note: string;
}

export interface RunInfo {
  name: string;
  steps: number;
  modified: number | string;
  task: string;
}

/** A line of metrics.jsonl; not every line has every number. */
export interface MetricsLine {
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

export interface RunAnswer {
  lines: MetricsLine[];
  first_line?: number; // number of the first line; 0 after later ones if the run was restarted
  next_line: number;
  config: string;
  finished: boolean;
}

export interface TrainingResult {
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

export interface CompareAnswer {
  same?: {
    length: number;
    seconds: Record<string, number>;
    difference: Record<string, number>;
    ratio: Record<string, number>;
  }[];
  control?: { length: number; difference: Record<string, number> };
  masked?: TrainingResult;
  unmasked?: TrainingResult;
}

/** What a key of the server does now, and has used since the start. */
export interface TenantStatus {
  label: string; // the first characters of the key's hash; empty on a server without keys
  operator: boolean;
  weight: number;
  share: number;
  users: number;
  in_flight: number;
  running_rows: number;
  running: number;
  paused: number;
  waiting: number;
  oldest_wait: number;
  requests: number;
  rate_limited: number;
  prompt_tokens: number;
  generation_tokens: number;
}

export interface CacheStatus {
  page_size: number;
  page_bytes: number;
  pages: number;
  used: number;
  prefix: number;
  prefix_queries: number;
  prefix_hits: number;
  preemptions: number;
}

export interface ConnectionStatus {
  open: number;
  limit: number;
  limit_per_address: number;
  refused: number;
  addresses: number;
  top: { address: string; open: number }[];
}

export type WorkName = "questions" | "audits" | "templates" | "grammars" | "tokenizing" | "preparation" | "validation" | "responses";

/** GET /explore/server. Counters start with the server; times are in seconds. */
export interface ServerStatus {
  status: "ready" | "draining" | "stalled" | "failed";
  model: string;
  version: string;
  device: string;
  dtype: string;
  threads: number;
  uptime: number;
  engine_age: number;
  steps: number;
  step_seconds: number;
  failures: number;
  prompt_tokens: number;
  generation_tokens: number;
  time_to_first_token: { requests: number; p50: number | null; p95: number | null };
  responses: Record<string, number>;
  queue: {
    running: number;
    running_rows: number;
    max_rows: number | null;
    paused: number;
    waiting: number;
    oldest_wait: number;
    in_flight: number;
  };
  cache: CacheStatus | null;
  tenants: TenantStatus[];
  more_tenants: number;
  connections: ConnectionStatus | null;
  beside_engine: { name: WorkName; running: number; waiting: number }[];
}

/** Of each question: its parameters and its answer. */
export interface QuestionTypes {
  model_info: [Record<string, never>, ModelInfo];
  attention: [Texts, AttentionAnswer];
  overview: [{ key: string; name: string; layer: number; head: Head; size: number }, OverviewAnswer];
  tile: [
    { key: string; name: string; layer: number; head: Head; row: number; column: number; size: number },
    TileAnswer,
  ];
  token_attention: [
    { key: string; name: string; layer: number; head: Head; token: number; incoming: boolean },
    { weights_f32: string },
  ];
  head_stats: [{ key: string; name: string; layer: number }, { heads: HeadStats[] }];
  next_token: [Texts & { tokens: number[]; unmasked: boolean }, NextTokenAnswer];
  token_texts: [{ ids: number[]; context: number[] }, { tokens: Token[] }];
  vocabulary: [Record<string, never>, { tokens: string[] }];
  continue_text: [
    Texts & { tokens: number[]; options: Record<string, number | boolean>; max_new_tokens: number },
    ContinueAnswer,
  ];
  beam: [
    Texts & { num_beams: number; max_new_tokens: number; length_penalty: number; early_stopping: boolean },
    BeamAnswer,
  ];
  alignment: [
    { source: string; tokens: number[]; layer: number | "mean"; head: number | "mean" },
    AlignmentAnswer,
  ];
  mask: [MaskParams, MaskAnswer];
  translate: [TranslateParams, TranslateAnswer];
  audit: [AuditParams, AuditAnswer];
  unmasked: [Texts, UnmaskedAnswer];
  runs: [Record<string, never>, { runs: RunInfo[] }];
  run: [{ name: string; from_line: number }, RunAnswer];
  compare: [Record<string, never>, CompareAnswer];
}

export type Question = keyof QuestionTypes;
export type Params<Q extends Question> = QuestionTypes[Q][0];
export type Answer<Q extends Question> = QuestionTypes[Q][1];
