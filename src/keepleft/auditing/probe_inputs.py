"""Random inputs to probe a model with: token ids, or features like those of an example."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPECIAL_TOKENS = 4  # of those that a model names, so many are tried


@dataclass(frozen=True)
class TokenSampler:
    """Samples ordinary token ids: none that the model treats in a way of its own."""

    pool: Tensor  # (n,) sorted
    special_tokens: tuple[int, ...] = ()  # ids that attributes of the model name

    def sample(self, batch: int, length: int, seed: int) -> Tensor:
        """(B, T), no two neighbours alike"""
        n, rng = len(self.pool), torch.Generator().manual_seed(seed)
        if n <= 3:  # too few for neighbours to differ and still be random
            return self.pool[torch.randint(0, n, (batch, length), generator=rng)]
        steps = torch.randint(1, n, (batch, length), generator=rng)
        return self.pool[(steps.cumsum(1) + torch.arange(batch)[:, None]) % n]

    def resample(self, tokens: Tensor, seed: int) -> Tensor:
        """Tokens of the same shape, each different from the one in its place."""
        n, rng = len(self.pool), torch.Generator().manual_seed(seed)
        indices = torch.searchsorted(self.pool, tokens.contiguous()).clamp(max=n - 1)
        return self.pool[(indices + torch.randint(1, max(2, n), tokens.shape, generator=rng)) % n]

    def special_changes(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        """Named changes of every token that random ones rarely make: all of one id, or copies of the first
        token.
        """
        first, last = self.pool[0], self.pool[-1]
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
        """Named changes of every vector that random ones never make."""
        first = tokens[:, :1].expand_as(tokens)
        return [
            ("zeros", (tokens == 0).to(tokens.dtype)),
            *(() if self.positive else (("the opposite", -tokens),)),
            ("copies of the first", first + (tokens == first).to(tokens.dtype)),
        ]


InputSampler = TokenSampler | FeatureSampler


def token_sampler(
    vocab_size: int, excluded_tokens: AbstractSet[int], special_tokens: tuple[int, ...]
) -> TokenSampler:
    """All ids but the excluded ones, or all where nothing is left."""
    ids = [token for token in range(vocab_size) if token not in excluded_tokens] or range(vocab_size)
    known_tokens = tuple(token for token in special_tokens if 0 <= token < vocab_size)
    return TokenSampler(torch.tensor(ids), known_tokens[:MAX_SPECIAL_TOKENS])


def feature_sampler(example: Tensor) -> FeatureSampler:
    """Features like those of an example, (B, T, …)."""
    values = example[example.isfinite()].float()
    std = float(values.std(unbiased=False)) if values.numel() > 1 else 1.0
    return FeatureSampler(
        tuple(example.shape[2:]),
        float(values.mean()) if values.numel() else 0.0,
        std or 1.0,
        example.dtype,
        bool((values > 0).all()) if values.numel() else False,
    )
