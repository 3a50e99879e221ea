"""Parts that several models of part B share, all of them right."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) to (B, H, T, D / H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, D / H) to (B, T, D)."""
    return x.transpose(1, 2).flatten(2)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions for (B, H, T, D); positions (T,) or (B, T)."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions.to(x.dtype)[..., None] * rates
    angles = angles[None, None] if positions.dim() == 1 else angles[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def tril(time: int) -> Tensor:
    """A causal mask, True where a query may look."""
    return torch.ones(time, time, dtype=torch.bool).tril()


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    """Multi-head attention; mask is True where a query may look, bias is added to the scores."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        context = x if context is None else context
        q, k, v = (split(f(y), self.heads) for f, y in ((self.q, x), (self.k, context), (self.v, context)))
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.o(merge(scores.softmax(-1) @ v))


class Block(nn.Module):
    """A pre-norm layer of attention and feed-forward."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(dim), Attention(dim, heads)
        self.mlp_norm, self.mlp = RMSNorm(dim), FeedForward(dim, 2 * dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), mask, **options)
        return x + self.mlp(self.mlp_norm(x))
