"""One layer: self-attention, cross-attention where there is a memory, feed-forward; each with its residual and norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from keepleft.attention.attend import Sight
from keepleft.nn.attention import CrossAttention, Heads, Remember, SelfAttention
from keepleft.nn.feedforward import Feed, FeedForward
from keepleft.nn.norm import Norm, norm


class Source(NamedTuple):
    """What one layer's cross-attention looks at."""

    k: Tensor
    v: Tensor
    sight: Sight


class Block(nn.Module):
    """Norm first (GPT-2, LLaMA, T5) or last (the 2017 Transformer, GPT, BERT, BART)."""

    def __init__(self, shape: Heads, feedforward: FeedForward, choice: Norm, *, norm_first: bool, cross: bool,
                 bias: bool, dropout: float) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.self = SelfAttention(shape)
        self.norm_self = norm(choice, shape.dim)
        if cross:
            self.cross = CrossAttention(shape)
            self.norm_cross = norm(choice, shape.dim)
        self.feed = Feed(feedforward, shape.dim, bias=bias)
        self.norm_feed = norm(choice, shape.dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sight: Sight, turn: tuple[Tensor, Tensor] | None = None,
                remember: Remember | None = None, source: Source | None = None) -> Tensor:
        x = self.around(x, self.norm_self, lambda y: self.self(y, sight, turn, remember))
        if source is not None:
            x = self.around(x, self.norm_cross, lambda y: self.cross(y, *source))
        return self.around(x, self.norm_feed, self.feed)

    def around(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The residual stream past one part."""
        return x + self.dropout(part(norm(x))) if self.norm_first else norm(x + self.dropout(part(x)))
