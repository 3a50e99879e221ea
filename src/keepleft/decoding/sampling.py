"""Greedy decoding and sampling: one sequence for each prompt, or several independent ones.

The random numbers are counter-based, a pure function of a seed and a position: a sequence is sampled the same
whatever is sampled beside it, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses, LogitsProcessor, apply_processors, isin
from keepleft.kernels.topk import topk_logsumexp

# (N, T) sequences and the prompt width → (N,) which of them stop here
StoppingCriterion = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class SamplingStrategy:
    """Greedy where `seeds` is None; otherwise each row is sampled with its own seed."""

    processors: Sequence[LogitsProcessor] = ()
    eos_ids: tuple[int, ...] = ()
    stop: StoppingCriterion | None = None
    seeds: Tensor | None = None  # (N,), or those of one prompt for all prompts
    num_sequences: int = 1  # sequences from each prompt

    def begin(
        self, prompt: Tensor, prompt_mask: Tensor | None, max_new_tokens: Tensor
    ) -> tuple[Hypotheses, Tensor | None]:
        n, device = len(prompt), prompt.device
        hypotheses = Hypotheses(
            prompt,
            torch.zeros(n, device=device),
            torch.zeros(n, dtype=torch.bool, device=device),
            torch.zeros(n, dtype=torch.long, device=device),
            max_new_tokens,
            prompt.shape[1],
            prompt_mask,
        )
        if self.num_sequences == 1:
            return hypotheses, None
        rows = torch.arange(n, device=device).repeat_interleave(self.num_sequences)
        return hypotheses.select_rows(rows), rows

    def choose(self, logits: Tensor, hypotheses: Hypotheses) -> tuple[Hypotheses, Tensor | None]:
        random_values = None
        if self.seeds is not None:
            # one seed may serve all prompts
            seeds = self.seeds.to(logits.device).repeat(len(logits) // len(self.seeds))
            random_values = uniform(seeds, hypotheses.num_new)
        tokens, logprobs = select_tokens(logits, self.processors, hypotheses, random_values)
        tokens = torch.where(hypotheses.done, hypotheses.tokens[:, -1], tokens)
        return append_tokens(
            hypotheses,
            tokens,
            hypotheses.score + logprobs.masked_fill(hypotheses.done, 0.0),
            self.eos_ids,
            self.stop,
        ), None

    def results(self, hypotheses: Hypotheses) -> list[list[FinishedSequence]]:
        hypotheses = hypotheses.unpad()
        sequences = [
            FinishedSequence(tokens[:length], score)
            for tokens, length, score in zip(
                hypotheses.tokens[:, hypotheses.prompt_width :].tolist(),
                hypotheses.lengths.tolist(),
                hypotheses.score.tolist(),
                strict=True,
            )
        ]
        return [sequences[n : n + self.num_sequences] for n in range(0, len(sequences), self.num_sequences)]


def greedy(*, eos_ids: Collection[int] = (), processors: Sequence[LogitsProcessor] = ()) -> SamplingStrategy:
    """Always the most likely token."""
    return SamplingStrategy(tuple(processors), tuple(eos_ids))


def sample(
    seed: int | Sequence[int],
    *,
    eos_ids: Collection[int] = (),
    processors: Sequence[LogitsProcessor] = (),
    num_sequences: int = 1,
) -> SamplingStrategy:
    """Tokens drawn by their probability, `copies` texts from each prompt.

    One seed for all prompts, or one for each.
    """
    prompt_seeds = [seed] if isinstance(seed, int) else list(seed)
    row_seeds = torch.cat(
        [derive_seeds(prompt_seed, torch.arange(num_sequences)) for prompt_seed in prompt_seeds]
    )
    return SamplingStrategy(tuple(processors), tuple(eos_ids), None, row_seeds, num_sequences)


def select_tokens(
    logits: Tensor,
    processors: Sequence[LogitsProcessor],
    hypotheses: Hypotheses | None,
    random_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(N, V) logits → (N,) tokens and their log-probabilities after the processors.

    Greedy where `random_values` is None; otherwise drawn with these (N,) numbers in [0, 1). Processors that
    look at logits alone need no hypotheses.
    """
    if processors or random_values is not None:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = apply_processors(logits, hypotheses, processors)
    if random_values is None:
        top = topk_logsumexp(logits, 1)
        return top.tokens[:, 0], top.values[:, 0] - top.logsumexp
    tokens = sample_tokens(logits, random_values)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def sample_tokens(logits: Tensor, random_values: Tensor) -> Tensor:
    """(N, V) scores and (N,) numbers in [0, 1) → (N,) tokens: where the running sum of probabilities passes
    the number.
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    index = torch.searchsorted(
        cumulative, (random_values[:, None].to(cumulative) * total).contiguous(), right=True
    )
    # the last token that can be drawn, should rounding pass it
    return torch.minimum(index, (cumulative < total).sum(-1, keepdim=True))[:, 0]


def append_tokens(
    hypotheses: Hypotheses,
    tokens: Tensor,
    score: Tensor,
    eos_ids: tuple[int, ...],
    stop: StoppingCriterion | None,
) -> Hypotheses:
    """Append one token to each row and update which rows are finished."""
    extended = hypotheses.append_column(hypotheses.tokens, tokens[:, None])
    lengths = hypotheses.lengths + ~hypotheses.done
    done = hypotheses.done | (lengths >= hypotheses.max_new_tokens)
    if eos_ids:
        done = done | isin(tokens, eos_ids)
    if stop is not None:
        done = done | stop(extended, hypotheses.prompt_width)
    return replace(
        hypotheses, tokens=extended, score=score, done=done, lengths=lengths, **hypotheses.mask_updates()
    )


_GAMMA = -0x61C8864680B583EB
_MULTIPLIER_1 = -0x40A7B892E31B1A47
_MULTIPLIER_2 = -0x6B2FB644ECCEEE15  # of SplitMix64 (Steele et al. 2014)


def splitmix64(seed: Tensor, counter: Tensor | int) -> Tensor:
    """SplitMix64 of two integers; the same on every device."""
    z = (
        seed + (counter + 1) * _GAMMA
        if isinstance(counter, Tensor)
        else seed + _wrap_int64((counter + 1) * _GAMMA)
    )
    z = (z ^ _logical_shift_right(z, 30)) * _MULTIPLIER_1
    z = (z ^ _logical_shift_right(z, 27)) * _MULTIPLIER_2
    return z ^ _logical_shift_right(z, 31)


def uniform(seed: Tensor, counter: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1), in float64."""
    return _logical_shift_right(splitmix64(seed, counter), 11).double() * 2.0**-53


def derive_seeds(seed: int, indices: Tensor) -> Tensor:
    """The seeds of several sequences of one request: (N,) from (N,) indices."""
    return splitmix64(torch.full_like(indices, _wrap_int64(seed)), indices)


def _logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed integer."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _wrap_int64(n: int) -> int:
    """Wrap around to a signed 64-bit integer."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)
