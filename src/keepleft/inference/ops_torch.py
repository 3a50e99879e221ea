"""The operations of a decode step in plain torch, over contiguous or paged keys and values.

Over pages, queries go to the pages and pages stay where they lie: gathering the pages of each sequence into a
row costs more than attending to them. Each page is attended to by the sequence that owns it, and the pages of
one sequence are combined by their softmax sums. Pages that belong to no sequence are computed too, as long as
they are few.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from keepleft.inference.ops import (
    CrossAttentionOp,
    DecodeContext,
    LinearResidualOp,
    NormLinearOp,
    PageBatch,
    PagedLayout,
    RotaryCosSin,
    SelfAttentionOp,
    StaticLayout,
)
from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import FeedForwardLayer
from keepleft.nn.position import apply_rotary


class TorchOps:
    """`static_shapes`: whole buffers, for compilers. `paged`: the context's layout is a `PagedLayout`."""

    def __init__(self, static_shapes: bool = False, paged: bool = False) -> None:
        self.static_shapes = static_shapes
        self.paged = paged

    def norm_linear(
        self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None
    ) -> NormLinearOp:
        normalize = norm_function(norm)
        apply_linear = linear.forward
        activate = None if feedforward is None else feedforward.activate

        def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = normalize(x)
            z = apply_linear(y)
            return x, y, z if activate is None else activate(z)

        return run

    def linear_residual(self, linear: nn.Module) -> LinearResidualOp:
        apply_linear = linear.forward
        return lambda x, y: x + apply_linear(y)

    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp:
        if self.paged:
            return _paged_self_attention(config, window)
        return (
            _static_self_attention(config, window) if self.static_shapes else _self_attention(config, window)
        )

    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp:
        if self.paged:
            return _paged_cross_attention(config)
        return _static_cross_attention(config) if self.static_shapes else _cross_attention(config)


def _self_attention(config: AttentionConfig, window: int | None) -> SelfAttentionOp:
    """Over the filled part of contiguous buffers."""
    heads = config.heads
    kv_heads = config.kv_heads
    head_dim = config.head_dim

    def run(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        layout = context.layout
        assert isinstance(layout, StaticLayout)
        q, k, v = split_qkv(qkv, config, context.rotary)
        stop = layout.length + 1
        begin = 0 if window is None else max(0, stop - window)
        keys[layout.length].copy_(k)
        values[layout.length].copy_(v)
        attended = _softmax_attention(
            q.reshape(len(q) * kv_heads, heads // kv_heads, head_dim),
            keys[begin:stop].flatten(1, 2).transpose(0, 1),
            values[begin:stop].flatten(1, 2).transpose(0, 1),
            layout.biases[window],
            config.softmax_scale,
        )
        return attended.view(len(q), -1)

    return run


def _static_self_attention(config: AttentionConfig, window: int | None) -> SelfAttentionOp:
    """Over whole contiguous buffers, whatever is filled: no shape depends on the position."""
    kv_heads, head_dim = config.kv_heads, config.head_dim

    def run(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        layout = context.layout
        assert isinstance(layout, StaticLayout)
        q, k, v = split_qkv(qkv, config, context.rotary)
        keys.index_copy_(0, context.position, k[None])
        values.index_copy_(0, context.position, v[None])
        if layout.beam_rows is not None:
            column = torch.arange(len(keys), device=keys.device)[:, None]
            keys, values = keys[column, layout.beam_rows], values[column, layout.beam_rows]
        scores = (q.view(len(q), kv_heads, -1, head_dim) * keys[:, :, :, None]).sum(-1) * config.softmax_scale
        bias = layout.biases[window]
        weights = (scores if bias is None else scores + bias).softmax(0)
        return (weights[..., None] * values[:, :, :, None]).sum(0).flatten(1)

    return run


def _cross_attention(config: AttentionConfig) -> CrossAttentionOp:
    def run(q: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        queries, bias = _source_queries(q, keys, config), _source_bias(context)
        if bias is not None:
            bias = bias[:, None, None].expand(-1, config.kv_heads, -1, -1).flatten(0, 1)
        attended = _softmax_attention(
            queries.reshape(len(keys) * config.kv_heads, -1, config.head_dim),
            keys.flatten(0, 1),
            values.flatten(0, 1),
            bias,
            config.softmax_scale,
        )
        rows_per_source = len(q) // len(keys)
        return (
            attended.view(len(keys), config.kv_heads, rows_per_source, -1).transpose(1, 2).reshape(len(q), -1)
        )

    return run


def _static_cross_attention(config: AttentionConfig) -> CrossAttentionOp:
    def run(q: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        queries, bias = _source_queries(q, keys, config), _source_bias(context)
        scores = (queries[:, :, :, :, None] * keys[:, :, None, None]).sum(-1) * config.softmax_scale
        weights = (scores if bias is None else scores + bias[:, None, None, None]).softmax(-1)
        return (weights[..., None] * values[:, :, None, None]).sum(-2).transpose(1, 2).reshape(len(q), -1)

    return run


def _source_queries(q: Tensor, keys: Tensor, config: AttentionConfig) -> Tensor:
    """(R, H · D) → (B, Hk, R / B, G, D): rows of one source, and heads of one key head, are so many more
    queries.
    """
    group_size = config.heads // config.kv_heads
    return q.view(len(keys), len(q) // len(keys), config.kv_heads, group_size, config.head_dim).transpose(
        1, 2
    )


def _source_bias(context: DecodeContext) -> Tensor | None:
    assert isinstance(context.layout, StaticLayout)
    return context.layout.source_bias


def _paged_self_attention(config: AttentionConfig, window: int | None) -> SelfAttentionOp:
    def run(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        layout = context.layout
        assert isinstance(layout, PagedLayout)
        q, k, v = split_qkv(qkv, config, context.rotary)
        keys[layout.page, :, layout.offset] = k
        values[layout.page, :, layout.offset] = v
        return _attend_batches(q, keys, values, layout.page_batches, window, config)

    return run


def _paged_cross_attention(config: AttentionConfig) -> CrossAttentionOp:
    def run(q: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        assert isinstance(context.layout, PagedLayout)
        q = q.view(len(q), -1, config.head_dim)
        return _attend_batches(q, keys, values, context.layout.source_batches, None, config)

    return run


def _attend_batches(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batches: list[PageBatch],
    window: int | None,
    config: AttentionConfig,
) -> Tensor:
    outputs = [
        paged_attention(q[batch.first_row : batch.end_row], keys, values, batch, batch.biases[window], config)
        for batch in batches
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, batch: PageBatch, bias: Tensor, config: AttentionConfig
) -> Tensor:
    """(R, H, D) over the pages of one batch → (R, H · D)"""
    kv_heads = config.kv_heads
    head_dim = config.head_dim
    num_sequences = batch.num_sequences
    q = q.view(num_sequences, batch.rows_per_sequence, kv_heads, -1, head_dim).transpose(1, 2)
    q = q.reshape(num_sequences, kv_heads, -1, head_dim)
    num_queries = q.shape[2]
    owners = batch.owners
    q = q.index_select(0, owners.clamp(max=num_sequences - 1)).flatten(0, 1)
    k = select_pages(keys, batch).flatten(0, 1)
    v = select_pages(values, batch).flatten(0, 1)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=config.softmax_scale)
    if batch.sequence_pages is not None:
        attended = torch.bmm(scores.softmax(-1), v).view(-1, kv_heads, num_queries, head_dim)
        attended = attended.index_select(0, batch.sequence_pages)
    else:
        scores = scores.view(-1, kv_heads, num_queries, batch.filled_slots)
        page_max = scores.amax(-1)
        sequence_max = page_max.new_full((num_sequences + 1, kv_heads, num_queries), float("-inf"))
        sequence_max.scatter_reduce_(0, owners[:, None, None].expand_as(page_max), page_max, "amax")
        exp_scores = (scores - sequence_max.index_select(0, owners)[..., None]).exp()
        page_sums = torch.bmm(exp_scores.flatten(0, 1), v).view(-1, kv_heads, num_queries, head_dim)
        attended = page_sums.new_zeros(num_sequences + 1, kv_heads, num_queries, head_dim)
        attended.index_add_(0, owners, page_sums)
        exp_sum = page_sums.new_zeros(num_sequences + 1, kv_heads, num_queries)
        exp_sum.index_add_(0, owners, exp_scores.sum(-1))
        attended = attended[:num_sequences] / exp_sum[:num_sequences, ..., None]
    attended = attended.view(num_sequences, kv_heads, batch.rows_per_sequence, -1, head_dim).transpose(1, 2)
    return attended.reshape(num_sequences * batch.rows_per_sequence, -1)


def select_pages(buffer: Tensor, batch: PageBatch) -> Tensor:
    """(pages, Hk, page_size, D) → (n, Hk, filled slots, D)"""
    if batch.page_ids is None:
        pages = buffer[batch.page_begin : batch.page_end]
    else:
        pages = buffer.index_select(0, batch.page_ids)
    return pages[:, :, : batch.filled_slots]


def split_qkv(qkv: Tensor, config: AttentionConfig, rotary: RotaryCosSin | None) -> tuple[Tensor, ...]:
    """(R, (H + 2 Hk) · D) → queries (R, H, D), keys and values (R, Hk, D); queries and keys rotated where
    RoPE is used.
    """
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
        shape = norm.normalized_shape
        weight = norm.weight
        bias = norm.bias
        eps = norm.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return norm.forward
