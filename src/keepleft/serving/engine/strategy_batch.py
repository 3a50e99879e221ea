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
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.serving.engine.sequence import Sequences

WIDTH_MULTIPLE = 64  # widths are multiples of it, so that they seldom change


def batch_key(strategy: SamplingStrategy | Beam) -> Any:
    """What strategies must have in common to be one group; None: it must stay alone."""
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


class StrategyBatch:
    """`fixed_width`: texts keep their width, so that requests of any age stand side by side."""

    def __init__(self, strategy: SamplingStrategy | Beam, fixed_width: bool) -> None:
        self.strategy = strategy
        self.fixed_width = fixed_width
        self.members: list[Sequences] = []
        self.hypotheses: Any = None

    def add(self, sequences: Sequences) -> None:
        """One more request, where it was when it left."""
        hypotheses = sequences.hypotheses
        if hypotheses is None:
            prompt = torch.tensor([sequences.prompt_tokens], device=sequences.device)
            hypotheses, _ = sequences.strategy.begin(
                prompt, None, torch.tensor([sequences.max_new_tokens], device=sequences.device)
            )
        if self.fixed_width:
            if hypotheses.new_count is None:
                hypotheses = hypotheses.pad_to_width(
                    _round_up(len(sequences.prompt_tokens) + sequences.max_new_tokens)
                )
                hypotheses = replace(
                    hypotheses, new_count=hypotheses.new_count.expand(len(hypotheses.tokens)).clone()
                )
            self.hypotheses = (
                hypotheses if self.hypotheses is None else _concat(*_same_width(self.hypotheses, hypotheses))
            )
        else:
            self.hypotheses = hypotheses
        self.members.append(sequences)
        sequences.hypotheses = None
        self._update_seeds()

    def remove(self, removed: set[Sequences]) -> None:
        """Some requests, each with its texts."""
        for n, sequences in enumerate(self.members):
            if sequences in removed:
                sequences.hypotheses = _select(self.hypotheses, [n], len(self.members))
        remaining = [n for n, sequences in enumerate(self.members) if sequences not in removed]
        self.hypotheses = _select(self.hypotheses, remaining, len(self.members)) if remaining else None
        self.members = [self.members[n] for n in remaining]
        self._update_seeds()

    def choose(
        self, logits: Tensor, on_failure: Callable[[Sequences, Exception], None]
    ) -> list[tuple[Sequences, Any, Tensor | None]]:
        """The next token of every text: of each request its texts, and which of them each continues (None:
        itself).

        A request that cannot go on is told of and left out.
        """
        try:
            hypotheses, rows = self.strategy.choose(logits, self.hypotheses)
        except Exception as error:
            if len(self.members) == 1:
                on_failure(self.members[0], error)
                return []
            return self._choose_one_by_one(logits, on_failure)
        self.hypotheses, rows_per_request = hypotheses, len(logits) // len(self.members)
        local_rows = None if rows is None else rows.view(-1, rows_per_request) % rows_per_request
        return [
            (
                sequences,
                _select(hypotheses, [n], len(self.members)),
                None if local_rows is None else local_rows[n],
            )
            for n, sequences in enumerate(self.members)
        ]

    def _choose_one_by_one(
        self, logits: Tensor, on_failure: Callable[[Sequences, Exception], None]
    ) -> list[tuple[Sequences, Any, Tensor | None]]:
        rows_per_request, members = len(logits) // len(self.members), list(self.members)
        self.remove(set(members))
        results: list[tuple[Sequences, Any, Tensor | None]] = []
        for n, sequences in enumerate(members):
            single = StrategyBatch(self.strategy, self.fixed_width)
            single.add(sequences)
            result = single.choose(logits[n * rows_per_request : (n + 1) * rows_per_request], on_failure)
            if result:
                single.remove({sequences})
                self.add(sequences)
            results += result
        return results

    def _update_seeds(self) -> None:
        if self.strategy.seeds is not None and self.members:
            seeds = [
                sequences.strategy.seeds for sequences in self.members if sequences.strategy.seeds is not None
            ]
            self.strategy = replace(self.strategy, seeds=torch.cat(seeds))


def _select(hypotheses: Any, indices: list[int], num_requests: int) -> Any:
    """Those of some of `num_requests` requests."""
    rows_by_size: dict[int, Tensor] = {}
    selected = {}
    for field in fields(hypotheses):
        value = getattr(hypotheses, field.name)
        if isinstance(value, Tensor) and value.dim():
            rows_per_request = len(value) // num_requests  # rows that a request has in this one
            if rows_per_request not in rows_by_size:
                request_index = torch.tensor(indices, device=value.device)
                rows_by_size[rows_per_request] = (
                    request_index[:, None] * rows_per_request
                    + torch.arange(rows_per_request, device=value.device)
                ).flatten()
            selected[field.name] = value[rows_by_size[rows_per_request]]
    return replace(hypotheses, **selected)


def _same_width(first: Any, second: Any) -> tuple[Any, Any]:
    """Both as wide as the wider."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    return _pad_to_width(first, width), _pad_to_width(second, width)


def _pad_to_width(hypotheses: Hypotheses, width: int) -> Hypotheses:
    padding = width - hypotheses.tokens.shape[1]
    if not padding:
        return hypotheses
    padded = {
        name: F.pad(value, (padding, 0))
        for name in ("tokens", "prompt_mask", "finished_tokens")
        if (value := getattr(hypotheses, name, None)) is not None
    }
    return replace(hypotheses, prompt_width=hypotheses.prompt_width + padding, **padded)


def _concat(first: Any, second: Any) -> Any:
    """One set of texts behind the other."""
    joined = {
        field.name: torch.cat([value, getattr(second, field.name)])
        for field in fields(first)
        if isinstance(value := getattr(first, field.name), Tensor)
    }
    return replace(first, **joined)


def _round_up(width: int) -> int:
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
