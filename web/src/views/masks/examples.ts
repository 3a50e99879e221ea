/** Masks to begin with. A recorded file holds the answers to these, over 16 positions without padding or packing. */

export const LENGTH = 16;

export const EXAMPLES: [expression: string, says: string][] = [
  ["causal", "each position sees the past and itself"],
  ["full", "everyone sees everyone"],
  ["causal & window(3)", "the three nearest of the past"],
  ["causal & window(3) | prefix(1)", "and the first position always"],
  ["prefix(5) | causal", "a prefix that all may see"],
  ["window(5)", "neighbours on both sides"],
  ["causal & block(4)", "the past of the same block"],
  ["~causal", "the future alone: a mistake to look at"],
];
