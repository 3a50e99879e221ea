/** Example masks. A snapshot contains their answers, for 16 positions without padding or packing. */

export const EXAMPLE_LENGTH = 16;

export const EXAMPLES: [expression: string, description: string][] = [
  ["causal", "each position attends to the past and itself"],
  ["full", "every position attends to every other"],
  ["causal & window(3)", "the last three positions"],
  ["causal & window(3) | prefix(1)", "the last three positions and the first"],
  ["prefix(5) | causal", "a prefix that every position attends to"],
  ["window(5)", "neighbours on both sides"],
  ["causal & block(4)", "the past of the same block"],
  ["~causal", "only the future: a faulty mask"],
];
