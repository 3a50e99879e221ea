"""Inputs to probe a model with: random token ids or features, and perturbations of what a position must not
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
MAX_SPECIAL_TOKENS = 4  # how many of the ids that a model names are tried


@dataclass(frozen=True)
class TokenSampler:
    """Samples ordinary token ids: none that the model treats specially."""

    pool: Tensor  # (n,) sorted
    special_tokens: tuple[int, ...] = ()  # ids that attributes of the model name
    token_shape: tuple[int, ...] = ()  # of what stands at each position: one id, or one of each codebook

    def sample(self, batch: int, length: int, seed: int) -> Tensor:
        """(B, T, …), no two neighbours alike"""
        n = len(self.pool)
        rng = torch.Generator().manual_seed(seed)
        if self.token_shape:
            return self.pool[torch.randint(0, n, (batch, length, *self.token_shape), generator=rng)]
        if n <= 3:  # too few for neighbours to differ and still be random
            return self.pool[torch.randint(0, n, (batch, length), generator=rng)]
        steps = torch.randint(1, n, (batch, length), generator=rng)
        return self.pool[(steps.cumsum(1) + torch.arange(batch)[:, None]) % n]

    def resample(self, tokens: Tensor, seed: int) -> Tensor:
        """Tokens of the same shape, each different from the one in its place."""
        n = len(self.pool)
        rng = torch.Generator().manual_seed(seed)
        indices = torch.searchsorted(self.pool, tokens.contiguous()).clamp(max=n - 1)
        return self.pool[(indices + torch.randint(1, max(2, n), tokens.shape, generator=rng)) % n]

    def special_changes(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        """Changes of every token that random ones rarely make, by name: one id everywhere, or copies of the
        first token.
        """
        first = self.pool[0]
        last = self.pool[-1]
        first_token = tokens[:, :1].expand_as(tokens)
        return [
            *(
                (f"the id {token}", torch.where(tokens == token, first, torch.tensor(token)))
                for token in self.special_tokens
            ),
            ("the first id", torch.where(tokens == first, last, first)),
            ("the last id", torch.where(tokens == last, first, last)),
            ("copies of the first token", torch.where(tokens == first_token, last, first_token)),
        ]


@dataclass(frozen=True)
class FeatureSampler:
    """Samples normal vectors with the mean and spread of an example."""

    feature_shape: tuple[int, ...]  # the axes after (B, T)
    mean: float
    std: float
    dtype: torch.dtype
    positive: bool = False  # prices, counts: nothing below zero

    def sample(self, batch: int, length: int, seed: int) -> Tensor:
        """(B, T, …)"""
        rng = torch.Generator().manual_seed(seed)
        features = torch.randn((batch, length, *self.feature_shape), generator=rng) * self.std + self.mean
        return (features.abs() + 1e-3 * self.std if self.positive else features).to(self.dtype)

    def resample(self, tokens: Tensor, seed: int) -> Tensor:
        """Other features of the same shape."""
        return self.sample(tokens.shape[0], tokens.shape[1], seed + 7919)

    def special_changes(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        """Changes of every vector that random ones never make, by name."""
        first = tokens[:, :1].expand_as(tokens)
        return [
            ("zeros", (tokens == 0).to(tokens.dtype)),
            *(() if self.positive else (("the opposite", -tokens),)),
            ("copies of the first", first + (tokens == first).to(tokens.dtype)),
        ]


@dataclass(frozen=True)
class SideSampler:
    """Samples what goes with each token: values that the example has at some position."""

    example: Tensor  # (B, T, …)

    def sample(self, batch: int, length: int, seed: int) -> Tensor:
        """(B, T, …)"""
        values = self.example.flatten(0, 1)
        rng = torch.Generator().manual_seed(seed)
        return values[torch.randint(0, len(values), (batch, length), generator=rng).to(values.device)]

    def resample(self, side: Tensor, seed: int) -> Tensor:
        """Others of the same shape; vectors that are all alike get some noise."""
        new = self.sample(side.shape[0], side.shape[1], seed)
        if new.is_floating_point() and torch.equal(new, side):
            rng = torch.Generator().manual_seed(seed)
            new = side + torch.randn(side.shape, generator=rng).to(side)
        return new


InputSampler = TokenSampler | FeatureSampler


def token_sampler(
    vocab_size: int,
    excluded_tokens: AbstractSet[int],
    special_tokens: tuple[int, ...],
    token_shape: tuple[int, ...] = (),
) -> TokenSampler:
    """Samples from all ids but the excluded ones, or from all where nothing would be left."""
    ids = [token for token in range(vocab_size) if token not in excluded_tokens] or range(vocab_size)
    known_tokens = tuple(token for token in special_tokens if 0 <= token < vocab_size)
    return TokenSampler(torch.tensor(ids), known_tokens[:MAX_SPECIAL_TOKENS], token_shape)


def feature_sampler(example: Tensor) -> FeatureSampler:
    """Samples features like those of an example, (B, T, …)."""
    values = example[example.isfinite()].float()
    std = float(values.std(unbiased=False)) if values.numel() > 1 else 1.0
    return FeatureSampler(
        tuple(example.shape[2:]),
        float(values.mean()) if values.numel() else 0.0,
        std or 1.0,
        example.dtype,
        bool((values > 0).all()) if values.numel() else False,
    )


# -- perturbations of hidden positions ---------------------------------------------------------


@dataclass(frozen=True)
class Perturbation:
    """Which positions of a sequence are changed, and to what."""

    mask: Tensor  # (T,) True: changed
    kind: str  # random, or the name of one of the sampler's special changes
    seed: int


def perturbations(allowed: Tensor, seeds: int, change_names: Sequence[str] = ()) -> list[Perturbation]:
    """For each reader, everything hidden from it changed at once, so that no hidden position is left out.

    allowed: (T, T), True where a reader may read. Readers with the same view share a perturbation.
    """
    hidden_masks = list(dict.fromkeys(tuple(row) for row in (~allowed).tolist() if any(row)))
    out = [Perturbation(torch.tensor(mask), "random", seed) for seed in range(seeds) for mask in hidden_masks]
    return out + [Perturbation(torch.tensor(mask), kind, 0) for kind in change_names for mask in hidden_masks]


def single_source_perturbations(allowed: Tensor) -> list[Perturbation]:
    """One position at a time, of those that are hidden from some reader."""
    length = len(allowed)
    return [
        Perturbation(torch.arange(length) == k, "random", 3) for k in range(length) if not allowed[:, k].all()
    ]


def first_middle_last(candidates: Sequence[Item]) -> list[Item]:
    """The few that a large model has time for."""
    last = len(candidates) - 1
    return [candidates[n] for n in sorted({0, len(candidates) // 2, last})] if candidates else []


def perturb(sampler: InputSampler, tokens: Tensor, perturbation: Perturbation) -> Tensor:
    """(1, T, …): one row with the perturbation applied."""
    new = (
        sampler.resample(tokens, 101 + 31 * perturbation.seed)
        if perturbation.kind == "random"
        else dict(sampler.special_changes(tokens))[perturbation.kind]
    )
    mask = perturbation.mask.view(1, -1, *[1] * (tokens.dim() - 2))
    return torch.where(mask, new.to(tokens.dtype), tokens)
