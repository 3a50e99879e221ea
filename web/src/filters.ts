/**
 * Logits filters for sampling: temperature, top-k, top-p, min-p, in this order.
 *
 * The reference is keepleft/decoding/filters.py. None of the four changes the order of tokens, so each keeps
 * a prefix of the ranking: here a filter is the length of that prefix, and moving a slider costs one pass
 * over the vocabulary.
 */

export interface SamplingParams {
  temperature: number;
  topK: number; // 0: all
  topP: number; // 1: all
  minP: number; // 0: all
}

export interface FilteredDistribution {
  kept: number; // tokens left, from the start of the ranking
  probabilities: Float64Array; // by rank, 0 from `kept` on
}

/**
 * Token ids in descending order of logits; of equal ones the higher id comes first. keepleft's top_p sorts
 * stably in ascending order and drops from the start, so it keeps ties in this order too.
 */
export function rankTokens(logits: Float32Array): Uint32Array {
  const bits = new Uint32Array(logits.slice().buffer);
  const keys = new Float64Array(logits.length);
  for (let id = 0; id < keys.length; id++) {
    // Map floats to integers of the same order, and add the id: 32 + 20 bits fit into a double.
    const isNegative = (bits[id] & 0x80000000) !== 0;
    const flipped = isNegative ? ~bits[id] >>> 0 : (bits[id] | 0x80000000) >>> 0;
    const sortable = logits[id] === 0 ? 0x80000000 : flipped;
    keys[id] = sortable * 0x100000 + id;
  }
  keys.sort();
  const order = new Uint32Array(keys.length);
  for (let n = 0; n < order.length; n++) order[n] = keys[keys.length - 1 - n] % 0x100000;
  return order;
}

/** The distribution after all filters; `order` is the result of rankTokens. */
export function filterLogits(
  logits: Float32Array,
  order: Uint32Array,
  params: SamplingParams,
): FilteredDistribution {
  const masses = new Float64Array(order.length); // probabilities that are not normalized
  const maxLogit = logits[order[0]];
  for (let n = 0; n < masses.length; n++) {
    masses[n] = Math.exp((logits[order[n]] - maxLogit) / params.temperature);
  }
  let kept = order.length;
  if (params.topK > 0) kept = topKCount(logits, order, Math.min(params.topK, kept));
  if (params.topP < 1) kept = topPCount(masses, kept, params.topP);
  kept = minPCount(masses, kept, params.minP);
  const total = sum(masses, kept);
  const probabilities = new Float64Array(masses.length);
  for (let n = 0; n < kept; n++) probabilities[n] = masses[n] / total;
  return { kept, probabilities };
}

/** The k most likely tokens, and those tied with the last of them. */
function topKCount(logits: Float32Array, order: Uint32Array, k: number): number {
  let kept = k;
  while (kept < order.length && logits[order[kept]] === logits[order[k - 1]]) kept++;
  return kept;
}

/** The most likely tokens with a total probability of at least p; a tail of at most 1 - p is dropped. */
function topPCount(masses: Float64Array, kept: number, p: number): number {
  const budget = (1 - p) * sum(masses, kept);
  let dropped = 0;
  while (kept > 1 && dropped + masses[kept - 1] <= budget) dropped += masses[--kept];
  return kept;
}

/** The tokens at least p times as likely as the most likely one. */
function minPCount(masses: Float64Array, kept: number, p: number): number {
  while (kept > 1 && masses[kept - 1] < p * masses[0]) kept--;
  return kept;
}

function sum(masses: Float64Array, end: number): number {
  let total = 0;
  for (let n = end - 1; n >= 0; n--) total += masses[n]; // small ones first, for precision
  return total;
}

/** In bits. */
export function entropy(probabilities: Float64Array): number {
  let bits = 0;
  for (const probability of probabilities) if (probability > 0) bits -= probability * Math.log2(probability);
  return bits;
}

/** Inverse transform sampling: the rank that `random`, from 0 to below 1, falls on. */
export function sampleIndex(probabilities: Float64Array, random: number): number {
  let n = 0;
  let remaining = random;
  while (n < probabilities.length - 1 && remaining >= probabilities[n] && probabilities[n + 1] > 0) {
    remaining -= probabilities[n++];
  }
  return n;
}
