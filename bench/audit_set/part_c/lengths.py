"""Lengths at which another branch runs: beyond a table, multiples of a block, powers of two, windows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl

from ..case import case
from ..proofs import future, outside
from .parts import MixerLM, SelfAttention, heads_first, heads_last, honest, lower, mixers, prefixes


class Rotary(nn.Module):
    def __init__(self, head_dim: int, base: float = 100.0, original_max_position: int = 32) -> None:
        super().__init__()
        self.dim, self.base, self.factor = head_dim, base, 2.0
        self.original_max_position = original_max_position

    def angles(self, t: int, like: Tensor) -> Tensor:
        base = self.base
        if t > self.original_max_position:
            grown = self.factor * t / self.original_max_position - (self.factor - 1)
            base = base * grown ** (self.dim / (self.dim - 2))
        rates = base ** (-torch.arange(0, self.dim, 2, device=like.device, dtype=like.dtype) / self.dim)
        return torch.arange(t, device=like.device, dtype=like.dtype)[:, None] * rates

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(x.size(-2), x)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class StaticRotary(Rotary):
    table: Tensor | None = None

    def angles(self, t: int, like: Tensor) -> Tensor:
        if self.table is None or self.table.size(0) < t:
            # Llama 3: low frequencies are slowed down once and for all
            rates = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
            turns = self.original_max_position * rates / (2 * torch.pi)
            smooth = ((turns - 0.5) / 1.5).clamp(0.0, 1.0)
            rates = rates * (smooth + (1.0 - smooth) / self.factor)
            self.table = torch.arange(t + 16, dtype=torch.float64)[:, None] * rates
        return self.table[:t].to(like)


class RotaryAttention(SelfAttention):
    def __init__(self, rotary: type[Rotary], dim: int = 16, heads: int = 2) -> None:
        super().__init__(dim, heads)
        self.rotary = rotary(dim // heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(heads_last(y))


def _after_a_short_one(model: Any, tokens: Tensor) -> Tensor:
    model(tokens[:, :2])
    return model(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=("", *mixers(2, "rotary")),
    after="after transformers #25104 (dynamic NTK scaling: the base depends on the length of the whole)",
    prove=lambda: prefixes(ntk_base_of_the_length, lengths=(40, 48), shorter=(20, 36)),
)
def ntk_base_of_the_length() -> dict[str, Any]:
    """Beyond 32 positions, the rotation of the first ones depends on how many follow."""
    torch.manual_seed(0)
    return {"target": MixerLM(RotaryAttention(Rotary), RotaryAttention(Rotary))}


@case(
    leaks=False,
    after="after transformers #25104, done right: Llama 3's scaling, the same for every length",
    prove=lambda: max(honest(rope_scaled_once), honest(rope_scaled_once, _after_a_short_one)),
)
def rope_scaled_once() -> dict[str, Any]:
    """Rotary frequencies scaled once, in a table that grows with the longest call."""
    torch.manual_seed(0)
    return {"target": MixerLM(RotaryAttention(StaticRotary), RotaryAttention(StaticRotary))}


class BlockSparseAttention(SelfAttention):
    def __init__(self, dim: int = 16, heads: int = 2, block: int = 12) -> None:
        super().__init__(dim, heads)
        self.block = block

    def inside(self, like: Tensor) -> Tensor:
        """What a block sees of itself."""
        return torch.ones(self.block, self.block, dtype=torch.bool, device=like.device)

    def pattern(self, t: int, like: Tensor) -> Tensor:
        number = torch.arange(t, device=like.device) // self.block
        q, k = number[:, None], number[None, :]
        return lower(t, like) & ((k == q) | (k == q - 1) | (k == 0))

    def sparse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, self.block)) for x in (q, k, v))
        count, c = q.size(2), self.block
        before = [F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1] for x in (k, v)]
        first = [x[:, :, :1].expand_as(x) for x in (k, v)]
        keys, values = (torch.cat(parts, dim=3) for parts in zip(first, before, (k, v), strict=True))
        number = torch.arange(count, device=q.device)[:, None, None]
        mask = torch.cat(
            (
                (number > 1).expand(-1, c, c),
                (number > 0).expand(-1, c, c),
                self.inside(q).expand(count, c, c),
            ),
            dim=2,
        )
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).flatten(2, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        t = x.size(1)
        if t > self.block and t % self.block == 0:
            y = self.sparse(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.pattern(t, x))
        return self.out(heads_last(y))


class BlockSparseCausal(BlockSparseAttention):
    def inside(self, like: Tensor) -> Tensor:
        return lower(self.block, like)


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="a common mistake: block-sparse attention with no mask in the diagonal block, if T divides",
    prove=lambda: future(sparse_blocks_when_divisible, lengths=(24, 36)),
)
def sparse_blocks_when_divisible() -> dict[str, Any]:
    """Blocks of 12 if the length is a multiple of 12 (there a block sees all of itself), or else a mask."""
    torch.manual_seed(0)
    return {"target": MixerLM(BlockSparseAttention(), BlockSparseAttention())}


@case(
    leaks=False,
    after="a common mistake, done right: block-sparse attention with a triangle in the diagonal block",
    prove=lambda: honest(sparse_blocks_masked),
)
def sparse_blocks_masked() -> dict[str, Any]:
    """First, previous and own block, in blocks if the length is a multiple of 12, or else by a mask."""
    torch.manual_seed(0)
    return {"target": MixerLM(BlockSparseCausal(), BlockSparseCausal())}


class DoublingScan(nn.Module):
    """h[t] = a[t] · h[t - 1] + u[t], in log2(T) steps where T is a power of two."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def shift(self, x: Tensor, by: int, fill: float) -> Tensor:
        return x.roll(by, dims=1)

    def scan(self, a: Tensor, u: Tensor) -> Tensor:
        by, t = 1, u.size(1)
        while by < t:
            u = u + a * self.shift(u, by, 0.0)
            a = a * self.shift(a, by, 1.0)
            by *= 2
        return u

    def steps(self, a: Tensor, u: Tensor) -> Tensor:
        h, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.size(1)):
            h = a[:, t] * h + u[:, t]
            out.append(h)
        return torch.stack(out, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        gate, u, g = self.in_proj(x).chunk(3, dim=-1)
        a, t = torch.sigmoid(gate), x.size(1)
        h = self.scan(a, u) if t > 4 and t & (t - 1) == 0 else self.steps(a, u)
        return self.out_proj(h * F.silu(g))


class FilledDoublingScan(DoublingScan):
    def shift(self, x: Tensor, by: int, fill: float) -> Tensor:
        return F.pad(x, (0, 0, by, 0), value=fill)[:, :-by]


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="a common mistake: a parallel scan by torch.roll, whose end wraps around, for powers of two only",
    prove=lambda: future(doubling_scan_wraps, lengths=(8, 16, 32)),
)
def doubling_scan_wraps() -> dict[str, Any]:
    """A scan step by step; where the length is a power of two it runs in parallel, and wraps around."""
    torch.manual_seed(0)
    return {"target": MixerLM(DoublingScan(), DoublingScan())}


@case(
    leaks=False,
    after="a common mistake, done right: a parallel scan whose shifts are filled with the neutral element",
    prove=lambda: honest(doubling_scan_filled),
)
def doubling_scan_filled() -> dict[str, Any]:
    """A scan step by step or, where the length is a power of two, in parallel; equal up to rounding."""
    torch.manual_seed(0)
    return {"target": MixerLM(FilledDoublingScan(), FilledDoublingScan())}


class WindowOrGlobalAttention(SelfAttention):
    def __init__(self, layer_idx: int, window: int = 6, pattern: int = 2) -> None:
        super().__init__()
        self.is_sliding = bool((layer_idx + 1) % pattern)
        self.window = window

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        visible = lower(x.size(1), x)
        if self.is_sliding:
            visible = visible & ~visible.tril(-self.window)
        return super().forward(x, visible)


@case(
    leaks=True,
    kinds=("future",),
    modules=("layers.1.mixer", "layers.1"),
    after="after transformers' sliding_window_pattern: each nth layer is global, not windowed",
    prove=lambda: future(one_layer_without_window, lengths=(20, 30), hidden=outside(6, 2)),
)
def one_layer_without_window() -> dict[str, Any]:
    """Said to see six positions in each of two layers; the second sees all of the past."""
    torch.manual_seed(0)
    model = MixerLM(WindowOrGlobalAttention(0), WindowOrGlobalAttention(1))
    return {"target": model, "claim": kl.causal & kl.window(6), "layers": 2}


class BandedAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2, window: int = 7) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.q_proj, self.kv_proj, self.o_proj = (nn.Linear(dim, n * dim) for n in (1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        t, w = x.size(1), self.window
        parts = (self.q_proj(x), *self.kv_proj(x).chunk(2, dim=-1))
        q, k, v = (heads_first(F.pad(p, (0, 0, 0, -t % w)), self.heads).unflatten(2, (-1, w)) for p in parts)
        k, v = (torch.cat((F.pad(y, (0, 0, 0, 0, 1, 0))[:, :, :-1], y), dim=3) for y in (k, v))
        i = torch.arange(w, device=x.device)[:, None] + w
        j = torch.arange(2 * w, device=x.device)[None]
        band = ((j <= i) & (j > i - w)).expand(q.size(2), -1, -1).clone()
        band[0, :, :w] = False
        scores = (q @ k.mT) * q.size(-1) ** -0.5
        y = scores.masked_fill(~band, -torch.inf).softmax(dim=-1) @ v
        return self.o_proj(heads_last(y.flatten(2, 3))[:, :t])


@case(
    leaks=False,
    after="Longformer's band, done right: blocks of the window's size, each with the one before it",
    prove=lambda: honest(band_of_seven, hidden=outside(7, 2)),
)
def band_of_seven() -> dict[str, Any]:
    """Two layers of attention in blocks of seven that see exactly seven positions."""
    torch.manual_seed(0)
    model = MixerLM(BandedAttention(), BandedAttention())
    return {"target": model, "claim": kl.causal & kl.window(7), "layers": 2}
