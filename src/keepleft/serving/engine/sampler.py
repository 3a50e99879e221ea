"""The next token of many texts whose choice needs nothing but scores, a few kinds at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.decoding.rng import uniform
from keepleft.decoding.sampling import select_tokens
from keepleft.serving.engine.sequence import Sequences

SampledLogprobs = tuple[float, list[tuple[int, float]]]


class SampledToken(NamedTuple):
    """The next token of one text."""

    sequences: Sequences
    sequence_index: int
    row: int  # of the scores
    token: int
    logprob: float  # its log-probability, after penalties and filters


def sample_batch(batch: Sequence[tuple[Sequences, int]], logits: Tensor) -> list[SampledToken]:
    """The next tokens of requests, each with its first row."""
    groups: dict[Any, list[tuple[Sequences, int, int]]] = {}
    for sequences, first_row in batch:
        groups.setdefault(sequences.sampling_key, []).extend(
            (sequences, index, first_row + index) for index in range(sequences.num_rows)
        )
    sampled: list[SampledToken] = []
    for group in groups.values():
        group_logits = (
            logits
            if len(group) == len(logits)
            else logits[torch.tensor([row for _, _, row in group], device=logits.device)]
        )
        tokens, logprobs = _sample_group(group, group_logits)
        sampled += [
            SampledToken(*entry, token, logprob)
            for entry, token, logprob in zip(group, tokens.tolist(), logprobs.tolist(), strict=True)
        ]
    return sampled


def _sample_group(group: list[tuple[Sequences, int, int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Texts that are chosen alike: greedily, or drawn after the same filters, each with its own seed."""
    sequences = group[0][0]
    random_values = None
    if sequences.seeds:
        to_tensor = lambda values: torch.tensor(values, device=logits.device)
        seeds = to_tensor([sequences.seeds[index] for sequences, index, _ in group])
        positions = to_tensor([len(sequences.new_tokens[index]) for sequences, index, _ in group])
        random_values = uniform(seeds, positions)
    return select_tokens(logits, sequences.strategy.processors, None, random_values)


def logprobs_of(sampled: SampledToken, logits: Tensor) -> SampledLogprobs | None:
    """By the model's own scores: the log-probability of what was chosen, and the likeliest; None where nobody
    asked.
    """
    num_top = sampled.sequences.request.logprobs
    if num_top is None:
        return None
    logprobs = logits[sampled.row].float().log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    return float(logprobs[sampled.token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
