"""Parts that several models of part C share, all of them right, and proofs that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import Build
from ..proofs import BOTH_MODES, Forward, Hidden, Runner, call, difference, future, later, sweep, token_maker

VOCAB = 50


def heads_first(x: Tensor, heads: int) -> Tensor:
    """(B, T, H · D) as (B, H, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def heads_last(x: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H · D)."""
    return x.transpose(1, 2).flatten(2)


def lower(t: int, like: Tensor) -> Tensor:
    """True where a query may look, in a causal model."""
    return torch.ones(t, t, dtype=torch.bool, device=like.device).tril()


class SelfAttention(nn.Module):
    """Causal attention, or by any mask that is True for visible."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def project(self, x: Tensor) -> list[Tensor]:
        return [heads_first(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        mask = lower(x.size(1), x) if mask is None else mask
        return self.out(heads_last(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class Layer(nn.Module):
    """A pre-norm layer: a mixer over time, then a feed-forward network."""

    def __init__(self, mixer: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.mixer = nn.LayerNorm(dim), nn.LayerNorm(dim), mixer
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = x + self.mixer(self.norm_1(x), *args)
        return x + self.mlp(self.norm_2(x))


class MixerLM(nn.Module):
    """A language model of such layers."""

    def __init__(self, *mixers: nn.Module, dim: int = 16, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(mixer, dim) for mixer in mixers)
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def mixers(count: int, *children: str) -> tuple[str, ...]:
    """The names of the mixers of a MixerLM, of their children, and of the layers."""
    names = [f"layers.{i}.mixer" for i in range(count)]
    return (*names, *(f"{n}.{c}" for n in names for c in children), *(f"layers.{i}" for i in range(count)))


def own_and_later(reader: int, source: int, length: int) -> bool:
    """A label may not be seen where it is predicted, nor before."""
    return source >= reader


def prefixes(
    build: Build,
    forward: Forward = call,
    *,
    inputs: Callable[[int, int], Tensor] | None = None,
    lengths: Iterable[int] = (24, 25, 33, 48, 65),
    shorter: Sequence[int] = (1, 2, 7, 8, 15, 16, 17, 23, 24, 31, 32, 40, 47),
    batch: int = 2,
    mode: str = "eval",
    fresh: bool = False,
) -> float:
    """Leave later positions out altogether; the largest change of what remains, in float64."""
    make, largest = inputs or token_maker(), 0.0
    run = Runner(build, forward, mode, True, fresh)
    for length in lengths:
        torch.manual_seed(length)
        whole = make(batch, length)
        whole = whole.double() if whole.is_floating_point() else whole
        base = run(whole)
        for n in shorter:
            if n < length:
                largest = max(largest, difference(run(whole[:, :n]), base[:, :n]))
    return largest


def honest(
    build: Build,
    forward: Forward = call,
    *,
    inputs: Callable[[int, int], Tensor] | None = None,
    hidden: Hidden = later,
    double: bool = False,
    lengths: Iterable[int] = tuple(range(1, 50)),
    fresh: bool = False,
) -> float:
    """All lengths to 49 and some beyond, both modes, other rows, and later positions left out."""
    kwargs: dict[str, Any] = dict(inputs=inputs, fresh=fresh)
    return max(
        sweep(build, forward, hidden=hidden, double=double, lengths=lengths, **kwargs),
        future(build, forward, hidden=hidden, double=double, lengths=(64, 96), modes=BOTH_MODES, **kwargs),
        prefixes(build, forward, **kwargs),
    )
