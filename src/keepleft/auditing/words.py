"""Sequences to try a model on: token ids from a pool, or features like those of an example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ids:
    """Token ids that stand for words: nothing that a model treats in a way of its own."""

    pool: Tensor  # (n,) sorted
    marks: tuple[int, ...] = ()  # ids that a model knows by name

    def draw(self, batch: int, length: int, seed: int) -> Tensor:
        """(B, T), neighbours differ"""
        n, chance = len(self.pool), torch.Generator().manual_seed(seed)
        if n <= 3:  # neighbours cannot all differ and still be free
            return self.pool[torch.randint(0, n, (batch, length), generator=chance)]
        steps = torch.randint(1, n, (batch, length), generator=chance)
        return self.pool[(steps.cumsum(1) + torch.arange(batch)[:, None]) % n]

    def others(self, tokens: Tensor, seed: int) -> Tensor:
        """As many others, each unlike the one in its place."""
        n, chance = len(self.pool), torch.Generator().manual_seed(seed)
        at = torch.searchsorted(self.pool, tokens.contiguous()).clamp(max=n - 1)
        return self.pool[(at + torch.randint(1, max(2, n), tokens.shape, generator=chance)) % n]

    def kinds(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        """Changes that chance alone rarely makes: all of one kind, copies of the first word, the order turned round."""
        first, last = self.pool[0], self.pool[-1]
        return [*((f"the id {mark}", torch.where(tokens == mark, first, torch.tensor(mark))) for mark in self.marks),
                ("the first id", torch.where(tokens == first, last, first)),
                ("the last id", torch.where(tokens == last, first, last)),
                ("copies of the first word", torch.where(tokens == tokens[:, :1], last, tokens[:, :1].expand_as(tokens)))]


@dataclass(frozen=True)
class Features:
    """Vectors: drawn like those of an example, and some far larger."""

    shape: tuple[int, ...]  # behind (B, T)
    mean: float
    spread: float
    dtype: torch.dtype
    positive: bool = False  # prices, counts: nothing below zero

    def draw(self, batch: int, length: int, seed: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed)
        drawn = torch.randn((batch, length, *self.shape), generator=chance) * self.spread + self.mean
        return (drawn.abs() + 1e-3 * self.spread if self.positive else drawn).to(self.dtype)

    def others(self, tokens: Tensor, seed: int) -> Tensor:
        return self.draw(tokens.shape[0], tokens.shape[1], seed + 7919)

    def kinds(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        return [("zeros", torch.where(tokens == 0, torch.ones_like(tokens), torch.zeros_like(tokens))),
                *(() if self.positive else (("the opposite", -tokens),)),
                ("copies of the first", tokens[:, :1].expand_as(tokens).clone() + (tokens == tokens[:, :1]).to(tokens.dtype))]


Words = Ids | Features


def like(example: Tensor, special: set[int], vocab: int | None, marks: tuple[int, ...] = ()) -> Words:
    """What an example is made of."""
    if example.is_floating_point():
        known = example[example.isfinite()].float()
        spread = float(known.std(unbiased=False)) if known.numel() > 1 else 1.0
        return Features(tuple(example.shape[2:]), float(known.mean()) if known.numel() else 0.0, spread or 1.0, example.dtype,
                        bool((known > 0).all()) if known.numel() else False)
    top = vocab if vocab is not None else int(example.max()) + 1
    pool = torch.tensor([token for token in range(top) if token not in special] or list(range(top)))
    return Ids(pool, tuple(mark for mark in marks if 0 <= mark < top)[:4])
