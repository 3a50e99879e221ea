"""Sampler of the engine: the next tokens of all requests that need nothing but logits, in few batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.decoding.sampling import select_tokens, uniform
from keepleft.serving.engine.sequence import SampledLogprobs, SequenceGroup


class SampledToken(NamedTuple):
    """The next token of one sequence."""

    group: SequenceGroup
    sequence_index: int  # in its group
    row: int  # of the logits
    token: int
    logprob: float  # after processors


def sample_batch(batch: Sequence[tuple[SequenceGroup, int]], logits: Tensor) -> list[SampledToken]:
    """The next token of every sequence of these requests, each with its first row in the (R, V) logits."""
    by_key: dict[Any, list[tuple[SequenceGroup, int, int]]] = {}
    for group, first_row in batch:
        by_key.setdefault(group.sampling_key, []).extend(
            (group, index, first_row + index) for index in range(group.num_rows)
        )
    sampled: list[SampledToken] = []
    for sequences in by_key.values():
        selected_logits = (
            logits
            if len(sequences) == len(logits)
            else logits[torch.tensor([row for _, _, row in sequences], device=logits.device)]
        )
        tokens, logprobs = _sample_alike(sequences, selected_logits)
        sampled += [
            SampledToken(*sequence, token, logprob)
            for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)
        ]
    return sampled


def _sample_alike(sequences: list[tuple[SequenceGroup, int, int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of sequences with the same processors: greedy, or each sampled with its own seed."""
    first_group = sequences[0][0]
    random_values = None
    if first_group.seeds:
        to_tensor = lambda values: torch.tensor(values, device=logits.device)
        seeds = to_tensor([group.seeds[index] for group, index, _ in sequences])
        positions = to_tensor([len(group.new_tokens[index]) for group, index, _ in sequences])
        random_values = uniform(seeds, positions)
    return select_tokens(logits, first_group.strategy.processors, None, random_values)


def raw_logprobs(sampled: SampledToken, logits: Tensor) -> SampledLogprobs | None:
    """Log-probability of a token by the raw logits, and the likeliest tokens; None where not requested."""
    num_top = sampled.group.request.logprobs
    if num_top is None:
        return None
    logprobs = logits[sampled.row].float().log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    return float(logprobs[sampled.token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
