"""One Transformer layer: self-attention, cross-attention in decoders with a source, feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from keepleft.attention.attend import Sight
from keepleft.nn.attention import AttentionConfig, CrossAttention, KVWrite, SelfAttention
from keepleft.nn.feedforward import FeedForward, FeedForwardLayer
from keepleft.nn.norm import Norm, make_norm


class CrossInput(NamedTuple):
    """One layer's keys and values of the source, (B, Hk, S, D), and what each query sees of them."""

    k: Tensor
    v: Tensor
    sight: Sight


class TransformerBlock(nn.Module):
    """Pre-norm (GPT-2, LLaMA, T5) or post-norm (the 2017 Transformer, GPT, BERT, BART)."""

    def __init__(
        self,
        config: AttentionConfig,
        feedforward: FeedForward,
        norm_config: Norm,
        *,
        norm_first: bool,
        cross: bool,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.self = SelfAttention(config)
        self.norm_self = make_norm(norm_config, config.dim)
        if cross:
            self.cross = CrossAttention(config)
            self.norm_cross = make_norm(norm_config, config.dim)
        self.feed = FeedForwardLayer(feedforward, config.dim, bias=bias)
        self.norm_feed = make_norm(norm_config, config.dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        sight: Sight,
        rotary: tuple[Tensor, Tensor] | None = None,
        kv_write: KVWrite | None = None,
        cross_input: CrossInput | None = None,
    ) -> Tensor:
        """(B, T, dim) → (B, T, dim)"""
        x = self.residual(x, self.norm_self, lambda y: self.self(y, sight, rotary, kv_write))
        if cross_input is not None:
            x = self.residual(x, self.norm_cross, lambda y: self.cross(y, *cross_input))
        return self.residual(x, self.norm_feed, self.feed)

    def residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer with its residual connection, norm and dropout."""
        return x + self.dropout(sublayer(norm(x))) if self.norm_first else norm(x + self.dropout(sublayer(x)))
