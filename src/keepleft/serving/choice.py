"""The next token of many texts whose choice needs nothing but scores, a few kinds at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.chance import uniform
from keepleft.decoding.single import drawn
from keepleft.nn.best import best
from keepleft.serving.job import Job

Spot = tuple[Job, int, int]  # a text: its request, which of its texts, and its row of the scores
Thought = tuple[float, list[tuple[int, float]]]


def chosen_plainly(spots: Sequence[Spot], scores: Tensor) -> dict[Spot, tuple[int, float]]:
    """Of each text the next token, and its log-probability after the filters."""
    kinds: dict[Any, list[Spot]] = {}
    for spot in spots:
        job = spot[0]
        kinds.setdefault((tuple(map(id, job.strategy.transforms)), bool(job.seeds)), []).append(spot)
    out: dict[Spot, tuple[int, float]] = {}
    for some in kinds.values():
        mine = scores if len(some) == len(scores) else scores[torch.tensor([row for _, _, row in some], device=scores.device)]
        tokens, gain = _kind(some, mine)
        out.update(zip(some, zip(tokens.tolist(), gain.tolist(), strict=True), strict=True))
    return out


def _kind(spots: list[Spot], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Texts that are chosen alike: greedily, or drawn after the same filters, each with its own seed."""
    job = spots[0][0]
    if job.strategy.transforms or job.seeds:
        scores = scores if scores.dtype == torch.float64 else scores.float()
    for transform in job.strategy.transforms:
        scores = transform(scores, None)  # type: ignore[arg-type]
    if not job.seeds:
        found = best(scores, 1)
        return found.tokens[:, 0], found.scores[:, 0] - found.total
    number = lambda values: torch.tensor(values, device=scores.device)
    chances = uniform(number([job.seeds[text] for job, text, _ in spots]),
                      number([len(job.written[text]) for job, text, _ in spots]))
    tokens = drawn(scores, chances)
    return tokens, scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)


def thoughts(spots: Sequence[Spot], told: Mapping[Spot, tuple[int, float]], scores: Tensor) -> dict[Spot, Thought]:
    """By the model's own scores: the log-probability of what was chosen, and the likeliest."""
    out: dict[Spot, Thought] = {}
    for spot in spots:
        job, _, row = spot
        logs = scores[row].float().log_softmax(-1)
        likely = logs.topk(min(job.ask.logprobs or 0, len(logs)))
        pairs = list(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
        out[spot] = float(logs[told[spot][0]]), pairs
    return out
