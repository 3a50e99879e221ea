"""What one step of a layer is made of when each row has one token, in plain PyTorch.

`enter` is a norm and the product behind it, `leave` a product and the residual behind it, `look` and `across` are the two
attentions. Each is made once and then called with tensors alone: (R, dim) and what belongs to the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import FeedForwardLayer
from keepleft.nn.position import apply_rotary

NormLinearOp = Callable[[Any], tuple[Any, Any, Tensor]]  # the stream → the stream, the stream behind the norm, the product
LinearResidualOp = Callable[[Any, Tensor], Any]              # the stream and (R, …) → the stream with the product of it added


class RotaryCosSin(NamedTuple):
    """Cosines and sines of each row's position, (R or 1, 1, D)."""

    cosines: Tensor
    sines: Tensor


@dataclass
class DecodeContext:
    """Where a step stands: what all layers share."""

    length: int                           # tokens before this one
    position: Tensor                           # (1,) the same, where a recording can read it
    rotary: RotaryCosSin | None = None
    starts: Tensor | None = None           # (R,) the column where each row's text begins; None: at 0
    relative_bias: Tensor | None = None            # (H, capacity) what is added to a score by distance
    beam_rows: Tensor | None = None         # (capacity, R) which row of the buffers holds a column of a row; None: itself
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window, what is added to the scores


class SelfAttentionOp(Protocol):
    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        """(R, (H + 2 Hk) · D) and buffers (capacity, R, Hk, D), written to → (R, H · D)"""
        ...


class CrossAttentionOp(Protocol):
    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """(R, H · D) over (B, Hk, S, D) of sources that R / B neighbours share; (B, S) is added → (R, H · D)"""
        ...


class DecodeOps(Protocol):
    """Where the work is done: plain PyTorch here, kernels for a GPU elsewhere."""

    static_shapes: bool  # buffers are looked at as they are, so that shapes never change, or only as far as they are filled

    def norm_linear(self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None) -> NormLinearOp: ...
    def linear_residual(self, linear: nn.Module) -> LinearResidualOp: ...
    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp: ...
    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp: ...


class TorchOps:
    """Plain PyTorch. `whole`: for compilers."""

    def __init__(self, static_shapes: bool = False) -> None:
        self.static_shapes = static_shapes

    def norm_linear(self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None) -> NormLinearOp:
        normalize, apply_linear, activate = norm_function(norm), linear.forward, None if feedforward is None else feedforward.activate

        def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = normalize(x)
            z = apply_linear(y)
            return x, y, z if activate is None else activate(z)
        return run

    def linear_residual(self, linear: nn.Module) -> LinearResidualOp:
        apply_linear = linear.forward
        return lambda x, y: x + apply_linear(y)

    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp:
        heads, kv_heads, head_dim, scale = config.heads, config.kv_heads, config.head_dim, config.softmax_scale

        def attend_filled(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
            q, k, v = split_qkv(qkv, config, context.rotary)
            stop = context.length + 1
            begin = 0 if window is None else max(0, stop - window)
            keys[context.length].copy_(k)
            values[context.length].copy_(v)
            return _softmax_attention(q.reshape(len(q) * kv_heads, heads // kv_heads, head_dim), keys[begin:stop].flatten(1, 2).transpose(0, 1),
                           values[begin:stop].flatten(1, 2).transpose(0, 1), context.biases[window], scale).view(len(q), -1)

        def attend_static(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
            q, k, v = split_qkv(qkv, config, context.rotary)
            keys.index_copy_(0, context.position, k[None])
            values.index_copy_(0, context.position, v[None])
            if context.beam_rows is not None:
                column = torch.arange(len(keys), device=keys.device)[:, None]
                keys, values = keys[column, context.beam_rows], values[column, context.beam_rows]
            scores = (q.view(len(q), kv_heads, -1, head_dim) * keys[:, :, :, None]).sum(-1) * scale
            bias = context.biases[window]
            weights = (scores if bias is None else scores + bias).softmax(0)
            return (weights[..., None] * values[:, :, :, None]).sum(0).flatten(1)

        return attend_static if self.static_shapes else attend_filled

    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp:
        heads, kv_heads, head_dim, scale = config.heads, config.kv_heads, config.head_dim, config.softmax_scale

        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
            num_sources = len(keys)
            rows_per_source = len(q) // num_sources
            # neighbours of one source, and heads of one key head, are so many more queries
            queries = q.view(num_sources, rows_per_source, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
            if not self.static_shapes:
                key_bias = None if bias is None else bias[:, None, None].expand(-1, kv_heads, -1, -1).flatten(0, 1)
                attended = _softmax_attention(queries.reshape(num_sources * kv_heads, -1, head_dim), keys.flatten(0, 1), values.flatten(0, 1), key_bias, scale)
                return attended.view(num_sources, kv_heads, rows_per_source, -1).transpose(1, 2).reshape(len(q), -1)
            scores = (queries[:, :, :, :, None] * keys[:, :, None, None]).sum(-1) * scale
            weights = (scores if bias is None else scores + bias[:, None, None, None]).softmax(-1)
            return (weights[..., None] * values[:, :, None, None]).sum(-2).transpose(1, 2).reshape(len(q), -1)
        return run


def split_qkv(qkv: Tensor, config: AttentionConfig, rotary: RotaryCosSin | None) -> tuple[Tensor, ...]:
    """(R, (H + 2 Hk) · D) → queries (R, H, D), keys and values (R, Hk, D), turned where they are to be"""
    heads, kv_heads = config.heads, config.kv_heads
    heads_qkv = qkv.view(len(qkv), -1, config.head_dim)
    if rotary is None:
        return heads_qkv.split([heads, kv_heads, kv_heads], 1)
    q, v = heads_qkv.split([heads + kv_heads, kv_heads], 1)
    q, k = apply_rotary(q, *rotary).split([heads, kv_heads], 1)
    return q, k, v


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(N, Q, D) over (N, K, D)"""
    if bias is None:
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=scale)
    else:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v)


def norm_function(norm: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """The norm as a bare function; None changes nothing."""
    if norm is None or isinstance(norm, nn.Identity):
        return lambda x: x
    if isinstance(norm, nn.LayerNorm):
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return norm.forward
