"""Sequences to try a model on: token ids from a pool, or features like those of an example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSampler:
    """Token ids that stand for words: nothing that a model treats in a way of its own."""

    pool: Tensor  # (n,) sorted
    special_tokens: tuple[int, ...] = ()  # ids that a model knows by name

    def sample(self, batch: int, length: int, seed: int) -> Tensor:
        """(B, T), neighbours differ"""
        n, rng = len(self.pool), torch.Generator().manual_seed(seed)
        if n <= 3:  # neighbours cannot all differ and still be free
            return self.pool[torch.randint(0, n, (batch, length), generator=rng)]
        steps = torch.randint(1, n, (batch, length), generator=rng)
        return self.pool[(steps.cumsum(1) + torch.arange(batch)[:, None]) % n]

    def resample(self, tokens: Tensor, seed: int) -> Tensor:
        """As many others, each unlike the one in its place."""
        n, rng = len(self.pool), torch.Generator().manual_seed(seed)
        indices = torch.searchsorted(self.pool, tokens.contiguous()).clamp(max=n - 1)
        return self.pool[(indices + torch.randint(1, max(2, n), tokens.shape, generator=rng)) % n]

    def special_changes(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        """Changes that chance alone rarely makes: all of one kind, copies of the first word, the order turned
        round.
        """
        first, last = self.pool[0], self.pool[-1]
        return [
            *(
                (f"the id {token}", torch.where(tokens == token, first, torch.tensor(token)))
                for token in self.special_tokens
            ),
            ("the first id", torch.where(tokens == first, last, first)),
            ("the last id", torch.where(tokens == last, first, last)),
            (
                "copies of the first word",
                torch.where(tokens == tokens[:, :1], last, tokens[:, :1].expand_as(tokens)),
            ),
        ]


@dataclass(frozen=True)
class FeatureSampler:
    """Vectors: drawn like those of an example, and some far larger."""

    feature_shape: tuple[int, ...]  # behind (B, T)
    mean: float
    std: float
    dtype: torch.dtype
    positive: bool = False  # prices, counts: nothing below zero

    def sample(self, batch: int, length: int, seed: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        features = torch.randn((batch, length, *self.feature_shape), generator=rng) * self.std + self.mean
        return (features.abs() + 1e-3 * self.std if self.positive else features).to(self.dtype)

    def resample(self, tokens: Tensor, seed: int) -> Tensor:
        return self.sample(tokens.shape[0], tokens.shape[1], seed + 7919)

    def special_changes(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        return [
            ("zeros", torch.where(tokens == 0, torch.ones_like(tokens), torch.zeros_like(tokens))),
            *(() if self.positive else (("the opposite", -tokens),)),
            (
                "copies of the first",
                tokens[:, :1].expand_as(tokens).clone() + (tokens == tokens[:, :1]).to(tokens.dtype),
            ),
        ]


InputSampler = TokenSampler | FeatureSampler


def sampler_like(
    example: Tensor, excluded_tokens: set[int], vocab_size: int | None, special_tokens: tuple[int, ...] = ()
) -> InputSampler:
    """What an example is made of."""
    if example.is_floating_point():
        values = example[example.isfinite()].float()
        std = float(values.std(unbiased=False)) if values.numel() > 1 else 1.0
        return FeatureSampler(
            tuple(example.shape[2:]),
            float(values.mean()) if values.numel() else 0.0,
            std or 1.0,
            example.dtype,
            bool((values > 0).all()) if values.numel() else False,
        )
    vocab_end = vocab_size if vocab_size is not None else int(example.max()) + 1
    pool = torch.tensor(
        [token for token in range(vocab_end) if token not in excluded_tokens] or list(range(vocab_end))
    )
    return TokenSampler(
        pool, tuple(special_token for special_token in special_tokens if 0 <= special_token < vocab_end)[:4]
    )
