"""The next token of many texts whose choice needs nothing but scores, a few kinds at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.decoding.chance import uniform
from keepleft.decoding.single import drawn
from keepleft.nn.best import best
from keepleft.serving.job import Job

Thought = tuple[float, list[tuple[int, float]]]


class Said(NamedTuple):
    """The next token of one text."""

    job: Job
    text: int
    row: int      # of the scores
    token: int
    gain: float   # its log-probability, after penalties and filters


def chosen_plainly(jobs: Sequence[tuple[Job, int]], scores: Tensor) -> list[Said]:
    """The next tokens of requests, each with its first row."""
    kinds: dict[Any, list[tuple[Job, int, int]]] = {}
    for job, first in jobs:
        kinds.setdefault(job.kind, []).extend((job, text, first + text) for text in range(job.width))
    out: list[Said] = []
    for some in kinds.values():
        mine = scores if len(some) == len(scores) else scores[torch.tensor([row for _, _, row in some], device=scores.device)]
        tokens, gain = _kind(some, mine)
        out += [Said(*spot, token, more) for spot, token, more in zip(some, tokens.tolist(), gain.tolist(), strict=True)]
    return out


def _kind(spots: list[tuple[Job, int, int]], scores: Tensor) -> tuple[Tensor, Tensor]:
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


def thought(said: Said, scores: Tensor) -> Thought | None:
    """By the model's own scores: the log-probability of what was chosen, and the likeliest; None where nobody asked."""
    wanted = said.job.ask.logprobs
    if wanted is None:
        return None
    logs = scores[said.row].float().log_softmax(-1)
    likely = logs.topk(min(wanted, len(logs)))
    return float(logs[said.token]), list(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
