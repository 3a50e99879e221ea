"""Requests with one decoding strategy as one batch, each at its own position."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.decoding.beam import Beam
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.serving.engine.sequence import SequenceGroup

WIDTH_MULTIPLE = 64  # widths are rounded up to it, so that they seldom change

AnyHypotheses = TypeVar("AnyHypotheses", bound=Hypotheses)


def batch_key(strategy: SamplingStrategy | Beam) -> Hashable | None:
    """Requests with equal keys share a batch; None: the request needs a batch of its own."""
    if strategy.stop is not None or not all(
        getattr(processor, "capturable", False) for processor in strategy.processors
    ):
        return None
    settings = tuple(
        getattr(strategy, field.name)
        for field in fields(strategy)
        if field.name not in ("seeds", "processors")
    )
    return type(strategy), settings, tuple(map(id, strategy.processors)), strategy.seeds is None


class StrategyChoice(NamedTuple):
    """The outcome of one step for one request."""

    group: SequenceGroup
    tokens: list[int]  # the next one of each sequence
    scores: list[float]  # of each sequence
    parents: Tensor | None  # (num_rows,) which of its sequences each one continues; None: itself
    finished: Hypotheses | None  # None while a sequence goes on


class StrategyBatch:
    """The hypotheses of its members, one request after the other.

    `fixed_width`: hypotheses keep their width, so that requests of any age fit into one tensor.
    """

    def __init__(self, strategy: SamplingStrategy | Beam, fixed_width: bool) -> None:
        self.strategy = strategy
        self.fixed_width = fixed_width
        self.members: list[SequenceGroup] = []
        self.hypotheses: Hypotheses | None = None

    def add(self, group: SequenceGroup) -> None:
        """Add a request, with its hypotheses from before it was last removed."""
        hypotheses = group.hypotheses
        if hypotheses is None:
            prompt = torch.tensor([group.prompt_tokens], device=group.device)
            max_new_tokens = torch.tensor([group.max_new_tokens], device=group.device)
            hypotheses, _ = group.strategy.begin(prompt, None, max_new_tokens)
        if self.fixed_width:
            if hypotheses.new_count is None:
                hypotheses = hypotheses.pad_to_width(
                    _round_up(len(group.prompt_tokens) + group.max_new_tokens)
                )
                assert hypotheses.new_count is not None
                new_count = hypotheses.new_count.expand(len(hypotheses.tokens)).clone()
                hypotheses = replace(hypotheses, new_count=new_count)
            if self.hypotheses is not None:
                hypotheses = _concat(*_same_width(self.hypotheses, hypotheses))
        self.hypotheses = hypotheses
        self.members.append(group)
        group.hypotheses = None
        self._update_seeds()

    def remove(self, removed: set[SequenceGroup]) -> None:
        """Remove requests; each takes its hypotheses along."""
        if not removed:
            return
        assert self.hypotheses is not None
        for n, group in enumerate(self.members):
            if group in removed:
                group.hypotheses = self._member_hypotheses(n)
        remaining = [n for n, group in enumerate(self.members) if group not in removed]
        self.hypotheses = _select(self.hypotheses, remaining, len(self.members)) if remaining else None
        self.members = [self.members[n] for n in remaining]
        self._update_seeds()

    def choose(
        self, logits: Tensor, on_failure: Callable[[SequenceGroup, Exception], None]
    ) -> list[StrategyChoice]:
        """Choose the next token of every sequence from (R, V) logits.

        A request that cannot go on is reported to `on_failure` and left out.
        """
        assert self.hypotheses is not None
        try:
            hypotheses, rows = self.strategy.choose(logits, self.hypotheses)  # type: ignore[arg-type]
        except Exception as error:
            if len(self.members) == 1:
                on_failure(self.members[0], error)
                return []
            return self._choose_one_by_one(logits, on_failure)
        self.hypotheses = hypotheses
        num_rows = len(logits) // len(self.members)
        parents = None if rows is None else rows.view(-1, num_rows) % num_rows
        # a list of each for the whole batch: tensors of each request would take longer than the choice
        tokens = hypotheses.tokens[:, -1].tolist()
        scores = hypotheses.score.tolist()
        done = hypotheses.done.view(-1, num_rows).all(1).tolist()
        return [
            StrategyChoice(
                group,
                tokens[n * num_rows : (n + 1) * num_rows],
                scores[n * num_rows : (n + 1) * num_rows],
                None if parents is None else parents[n],
                self._member_hypotheses(n) if done[n] else None,
            )
            for n, group in enumerate(self.members)
        ]

    def _member_hypotheses(self, index: int) -> Hypotheses:
        """A copy of the hypotheses of one member."""
        assert self.hypotheses is not None
        return _select(self.hypotheses, [index], len(self.members))

    def _choose_one_by_one(
        self, logits: Tensor, on_failure: Callable[[SequenceGroup, Exception], None]
    ) -> list[StrategyChoice]:
        """The same after the batch failed: requests that fail by themselves leave it."""
        members = list(self.members)
        rows_per_request = len(logits) // len(members)
        self.remove(set(members))
        choices: list[StrategyChoice] = []
        for group, group_logits in zip(members, logits.split(rows_per_request), strict=True):
            single = StrategyBatch(self.strategy, self.fixed_width)
            single.add(group)
            group_choices = single.choose(group_logits, on_failure)
            if group_choices:
                single.remove({group})
                self.add(group)
            choices += group_choices
        return choices

    def _update_seeds(self) -> None:
        """The strategy's seeds are those of its members, in order."""
        if self.strategy.seeds is not None and self.members:
            seeds = [group.strategy.seeds for group in self.members if group.strategy.seeds is not None]
            self.strategy = replace(self.strategy, seeds=torch.cat(seeds))


def _select(hypotheses: AnyHypotheses, indices: list[int], num_requests: int) -> AnyHypotheses:
    """The rows of some of the batch's `num_requests` requests; fields differ in their rows per request."""
    rows_by_size: dict[int, Tensor] = {}
    selected: dict[str, Any] = {}
    for field in fields(hypotheses):
        value = getattr(hypotheses, field.name)
        if isinstance(value, Tensor) and value.dim():
            rows_per_request = len(value) // num_requests
            if rows_per_request not in rows_by_size:
                first_rows = torch.tensor(indices, device=value.device)[:, None] * rows_per_request
                rows = first_rows + torch.arange(rows_per_request, device=value.device)
                rows_by_size[rows_per_request] = rows.flatten()
            selected[field.name] = value[rows_by_size[rows_per_request]]
    return replace(hypotheses, **selected)


def _same_width(first: AnyHypotheses, second: AnyHypotheses) -> tuple[AnyHypotheses, AnyHypotheses]:
    """Both padded to the width of the wider one."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    return _pad_to_width(first, width), _pad_to_width(second, width)


def _pad_to_width(hypotheses: AnyHypotheses, width: int) -> AnyHypotheses:
    padding = width - hypotheses.tokens.shape[1]
    if not padding:
        return hypotheses
    padded = {
        name: F.pad(value, (padding, 0))
        for name in ("tokens", "prompt_mask", "finished_tokens")
        if (value := getattr(hypotheses, name, None)) is not None
    }
    return replace(hypotheses, prompt_width=hypotheses.prompt_width + padding, **padded)


def _concat(first: AnyHypotheses, second: AnyHypotheses) -> AnyHypotheses:
    """The rows of both."""
    joined: dict[str, Any] = {
        field.name: torch.cat([value, getattr(second, field.name)])
        for field in fields(first)
        if isinstance(value := getattr(first, field.name), Tensor)
    }
    return replace(first, **joined)


def _round_up(width: int) -> int:
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
