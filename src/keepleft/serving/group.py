"""Texts of several requests that are gone on with by one strategy, together: each keeps its own count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.decoding.beam import Beam
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.single import Single
from keepleft.serving.job import Job

ROUND = 64  # widths are multiples of it, so that they seldom change


def plan(strategy: Single | Beam) -> Any:
    """What strategies must have in common to be one group; None: it must stay alone."""
    if strategy.stop is not None or not all(getattr(transform, "steady", False) for transform in strategy.transforms):
        return None
    said = tuple(getattr(strategy, field.name) for field in fields(strategy) if field.name not in ("seeds", "transforms"))
    return type(strategy), said, tuple(map(id, strategy.transforms)), strategy.seeds is None


class Group:
    """`lasting`: texts keep their width, so that requests of any age stand side by side."""

    def __init__(self, strategy: Single | Beam, lasting: bool) -> None:
        self.strategy, self.lasting = strategy, lasting
        self.jobs: list[Job] = []
        self.texts: Any = None

    def join(self, job: Job) -> None:
        """One more request, where it was when it left."""
        texts = job.texts
        if texts is None:
            prompt = torch.tensor([job.begun], device=job.device)
            texts, _ = job.strategy.begin(prompt, None, torch.tensor([job.limit], device=job.device))
        if self.lasting:
            if texts.count is None:
                texts = texts.fixed(_rounded(len(job.begun) + job.limit))
                texts = replace(texts, count=texts.count.expand(len(texts.tokens)).clone())
            self.texts = texts if self.texts is None else _together(*_alike(self.texts, texts))
        else:
            self.texts = texts
        self.jobs.append(job)
        job.texts = None
        self._seeded()

    def leave(self, gone: set[Job]) -> None:
        """Some requests, each with its texts."""
        for n, job in enumerate(self.jobs):
            if job in gone:
                job.texts = _part(self.texts, [n], len(self.jobs))
        stay = [n for n, job in enumerate(self.jobs) if job not in gone]
        self.texts = _part(self.texts, stay, len(self.jobs)) if stay else None
        self.jobs = [self.jobs[n] for n in stay]
        self._seeded()

    def choose(self, scores: Tensor, failed: Callable[[Job, Exception], None]) -> list[tuple[Job, Any, Tensor | None]]:
        """The next token of every text: of each request its texts, and which of them each continues (None: itself).

        A request that cannot go on is told of and left out.
        """
        try:
            texts, rows = self.strategy.choose(scores, self.texts)
        except Exception as error:
            if len(self.jobs) == 1:
                failed(self.jobs[0], error)
                return []
            return self._one_by_one(scores, failed)
        self.texts, width = texts, len(scores) // len(self.jobs)
        local = None if rows is None else rows.view(-1, width) % width
        return [(job, _part(texts, [n], len(self.jobs)), None if local is None else local[n])
                for n, job in enumerate(self.jobs)]

    def _one_by_one(self, scores: Tensor, failed: Callable[[Job, Exception], None]) -> list[tuple[Job, Any, Tensor | None]]:
        width, everyone = len(scores) // len(self.jobs), list(self.jobs)
        self.leave(set(everyone))
        out: list[tuple[Job, Any, Tensor | None]] = []
        for n, job in enumerate(everyone):
            alone = Group(self.strategy, self.lasting)
            alone.join(job)
            found = alone.choose(scores[n * width:(n + 1) * width], failed)
            if found:
                alone.leave({job})
                self.join(job)
            out += found
        return out

    def _seeded(self) -> None:
        if self.strategy.seeds is not None and self.jobs:
            seeds = [job.strategy.seeds for job in self.jobs if job.strategy.seeds is not None]
            self.strategy = replace(self.strategy, seeds=torch.cat(seeds))


def _part(texts: Any, which: list[int], count: int) -> Any:
    """Those of some of `count` requests."""
    picks: dict[int, Tensor] = {}
    out = {}
    for field in fields(texts):
        value = getattr(texts, field.name)
        if isinstance(value, Tensor) and value.dim():
            each = len(value) // count  # rows that a request has in this one
            if each not in picks:
                first = torch.tensor(which, device=value.device)
                picks[each] = (first[:, None] * each + torch.arange(each, device=value.device)).flatten()
            out[field.name] = value[picks[each]]
    return replace(texts, **out)


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both as wide as the wider."""
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    return _wider(one, width), _wider(other, width)


def _wider(texts: Hypotheses, width: int) -> Hypotheses:
    more = width - texts.tokens.shape[1]
    if not more:
        return texts
    wide = {name: F.pad(value, (more, 0)) for name in ("tokens", "real", "ended")
            if (value := getattr(texts, name, None)) is not None}
    return replace(texts, begin=texts.begin + more, **wide)


def _together(one: Any, other: Any) -> Any:
    """One set of texts behind the other."""
    out = {field.name: torch.cat([value, getattr(other, field.name)]) for field in fields(one)
           if isinstance(value := getattr(one, field.name), Tensor)}
    return replace(one, **out)


def _rounded(width: int) -> int:
    return -(-width // ROUND) * ROUND
