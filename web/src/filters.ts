/**
 * What narrows a distribution before a token is drawn from it: temperature, top-k, top-p, min-p, in this order.
 *
 * The slow definition is keepleft/decoding/filters.py. None of the four changes the order of tokens, so each keeps a beginning
 * of the ranking: they are numbers here, and a slider costs one pass over the vocabulary.
 */

export interface Dials {
  temperature: number;
  topK: number; // 0: all
  topP: number; // 1: all
  minP: number; // 0: all
}

export interface Narrowed {
  kept: number; // so many of the ranking are left
  chances: Float64Array; // of each place in the ranking, 0 beyond `kept`
}

/**
 * Token ids, the likeliest first. Of equals the higher id comes first: that is the order in which keepleft's top_p, a stable
 * sort from the other end, gives them up last.
 */
export function ranked(scores: Float32Array): Uint32Array {
  const bits = new Uint32Array(scores.slice().buffer);
  const keys = new Float64Array(scores.length);
  for (let id = 0; id < keys.length; id++) {
    // Floats in the order of whole numbers, with the id below: 32 + 20 bits fit a double.
    const sortable = scores[id] === 0 ? 0x80000000 : bits[id] & 0x80000000 ? ~bits[id] >>> 0 : (bits[id] | 0x80000000) >>> 0;
    keys[id] = sortable * 0x100000 + id;
  }
  keys.sort();
  const out = new Uint32Array(keys.length);
  for (let n = 0; n < out.length; n++) out[n] = keys[keys.length - 1 - n] % 0x100000;
  return out;
}

export function narrowed(scores: Float32Array, order: Uint32Array, dials: Dials): Narrowed {
  const masses = new Float64Array(order.length);
  const best = scores[order[0]];
  for (let n = 0; n < masses.length; n++) masses[n] = Math.exp((scores[order[n]] - best) / dials.temperature);
  let kept = order.length;
  if (dials.topK > 0) kept = nearest(scores, order, Math.min(dials.topK, kept));
  if (dials.topP < 1) kept = nucleus(masses, kept, dials.topP);
  kept = likely(masses, kept, dials.minP);
  const all = sum(masses, kept);
  const chances = new Float64Array(masses.length);
  for (let n = 0; n < kept; n++) chances[n] = masses[n] / all;
  return { kept, chances };
}

/** The k likeliest, and those just as likely as the last of them. */
function nearest(scores: Float32Array, order: Uint32Array, k: number): number {
  let kept = k;
  while (kept < order.length && scores[order[kept]] === scores[order[k - 1]]) kept++;
  return kept;
}

/** The likeliest that together have a probability of at least p: from the other end, all that fit into 1 - p go. */
function nucleus(masses: Float64Array, kept: number, p: number): number {
  const room = (1 - p) * sum(masses, kept);
  let given = 0;
  while (kept > 1 && given + masses[kept - 1] <= room) given += masses[--kept];
  return kept;
}

/** Those at least p times as likely as the likeliest. */
function likely(masses: Float64Array, kept: number, p: number): number {
  while (kept > 1 && masses[kept - 1] < p * masses[0]) kept--;
  return kept;
}

function sum(masses: Float64Array, end: number): number {
  let all = 0;
  for (let n = end - 1; n >= 0; n--) all += masses[n]; // the small ones first, for the last digits
  return all;
}

/** In bits. */
export function entropy(chances: Float64Array): number {
  let bits = 0;
  for (const chance of chances) if (chance > 0) bits -= chance * Math.log2(chance);
  return bits;
}

/** The place in the ranking that a number between 0 and 1 falls on. */
export function drawn(chances: Float64Array, luck: number): number {
  let n = 0;
  for (let left = luck; n < chances.length - 1 && left >= chances[n] && chances[n + 1] > 0; n++) left -= chances[n];
  return n;
}
