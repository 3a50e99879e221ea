"""The two attentions of inference/ops_triton.py over pages: each row looks up, column by column, in which slot its keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.inference.ops_torch import (
    CrossAttentionOp,
    LinearResidualOp,
    NormLinearOp,
    RotaryCosSin,
    SelfAttentionOp,
)
from keepleft.inference.ops_triton import TritonOps
from keepleft.kernels.decode_attention import (
    block_config,
    combine_splits,
    load_rotated,
    online_softmax,
    softmax_of_self,
    split_kv,
    split_range,
    store_kv,
    store_output,
)
from keepleft.kernels.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl_kwargs,
    tl,
)
from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import FeedForwardLayer


@dataclass
class SlotTableContext:
    """Where each row stands, all of it on the device."""

    slot_table: Tensor               # (seats, columns) the slot of each token of a text
    table_rows: Tensor                # (R,) whose text a row goes on with
    lengths: Tensor              # (R,) tokens before this one
    write_slots: Tensor                # (R,) where its own key and value go
    rotary: RotaryCosSin | None = None
    relative_bias: Tensor | None = None  # (H, capacity) what is added to a score by distance


class PagedTritonOps:
    """Tools for steps over pages on a GPU: buffers are (pages, Hk, size, D)."""

    static_shapes = True

    def __init__(self) -> None:
        self.triton_ops = TritonOps()

    def norm_linear(self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None) -> NormLinearOp:
        return self.triton_ops.norm_linear(norm, linear, feedforward)

    def linear_residual(self, linear: nn.Module) -> LinearResidualOp:
        return self.triton_ops.linear_residual(linear)

    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, context: Any) -> Tensor:
            return _paged_self_attention(qkv, keys, values, context, config, window or 0)
        return run

    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
            out = torch.empty_like(q)
            block, warps = block_config(len(q) * config.heads, config.head_dim)
            _paged_cross_attention_kernel[(len(q), config.heads)](
                q, keys, values, out, bias.slot_table, bias.table_rows, bias.lengths, bias.slot_table.stride(0), config.softmax_scale, config.heads,
                config.kv_heads, config.head_dim, next_power_of_2(config.head_dim), keys.shape[2], q.is_cuda, block, num_warps=warps, **pdl_kwargs(q))
            return out
        return run


def _paged_self_attention(qkv: Tensor, keys: Tensor, values: Tensor, context: SlotTableContext, config: AttentionConfig, window: int) -> Tensor:
    """Self-attention of one token for each row over its own text; its key and value are written on the way."""
    rows, head_dim, columns = len(qkv), config.head_dim, context.slot_table.shape[1]
    out = torch.empty(rows, config.heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    splits, partials = split_kv(out, columns, window, config)
    rotary = context.rotary
    block, warps = block_config(rows * config.heads, head_dim)
    _paged_self_attention_kernel[(rows, config.heads, splits)](
        qkv, keys, values, out, partials, context.slot_table, context.table_rows, context.lengths, context.write_slots, qkv if context.relative_bias is None else context.relative_bias,
        qkv if rotary is None else rotary.cosines, qkv if rotary is None else rotary.sines, context.slot_table.stride(0),
        0 if context.relative_bias is None else context.relative_bias.shape[1], 0 if rotary is None else rotary.cosines.stride(0), config.softmax_scale,
        config.heads, config.kv_heads, head_dim, next_power_of_2(head_dim), keys.shape[2], context.relative_bias is not None, rotary is not None, window,
        splits, qkv.is_cuda, block, num_warps=warps, **pdl_kwargs(qkv))
    if splits > 1:
        combine_splits(partials, out, splits, config)
    return out


@jit  # type: ignore[untyped-decorator]
def _slot_offset(slot, kv_head, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr):  # type: ignore
    """Where a slot's numbers for one head begin."""
    slot64 = slot.to(tl.int64)
    return (slot64 // page_size) * (kv_heads * page_size * head_dim) + kv_head * (page_size * head_dim) + (slot64 % page_size) * head_dim


@jit  # type: ignore[untyped-decorator]
def _paged_self_attention_kernel(qkv, keys, values, out, partials, slot_table, table_rows, lengths, write_slots, relative_bias, cosines, sines, table_stride, relative_bias_stride,  # type: ignore
                 rotary_stride, scale, heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
                 page_size: tl.constexpr, has_relative_bias: tl.constexpr, has_rotary: tl.constexpr, window: tl.constexpr, splits: tl.constexpr,
                 use_pdl: tl.constexpr, block: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = h // (heads // kv_heads)
    d = tl.arange(0, padded_dim)
    dim_mask = d < head_dim
    # what earlier steps wrote is there before this step's own query is
    stop = tl.load(lengths + r)
    slot_pointer = slot_table + tl.load(table_rows + r) * table_stride
    begin, end = split_range(stop * 0, stop, split, window, splits)
    lane = tl.arange(0, block)
    c = begin + lane
    key_mask = c < end
    offsets = _slot_offset(tl.load(slot_pointer + c, mask=key_mask, other=0), kv_head, kv_heads, head_dim, page_size)[:, None] + d[None, :]
    kv_mask = key_mask[:, None] & dim_mask[None, :]
    k_block = tl.load(keys + offsets, mask=kv_mask, other=0.0)
    v_block = tl.load(values + offsets, mask=kv_mask, other=0.0)
    if use_pdl:
        gdc_wait()
    qkv_pointer = qkv + r * (heads + 2 * kv_heads) * head_dim
    q = load_rotated(qkv_pointer + h * head_dim, r, cosines, sines, rotary_stride, d, dim_mask, head_dim, has_rotary) * scale
    k = load_rotated(qkv_pointer + (heads + kv_head) * head_dim, r, cosines, sines, rotary_stride, d, dim_mask, head_dim, has_rotary)
    k = k.to(keys.dtype.element_ty).to(tl.float32)
    v = tl.load(qkv_pointer + (heads + kv_heads + kv_head) * head_dim + d, mask=dim_mask, other=0.0).to(tl.float32)
    store_kv(keys, values, _slot_offset(tl.load(write_slots + r), kv_head, kv_heads, head_dim, page_size) + d, k, v, dim_mask,
         (split == 0) & (h % (heads // kv_heads) == 0))
    running_max, running_sum, accumulator = softmax_of_self(q, k, v, relative_bias + h * relative_bias_stride, split, has_relative_bias, splits)
    for column in range(begin, end, block):
        c = column + lane
        key_mask = c < end
        next_c = c + block
        offsets = _slot_offset(tl.load(slot_pointer + next_c, mask=next_c < end, other=0), kv_head, kv_heads, head_dim, page_size)[:, None] + d[None, :]
        kv_mask = (next_c < end)[:, None] & dim_mask[None, :]
        k_next = tl.load(keys + offsets, mask=kv_mask, other=0.0)
        v_next = tl.load(values + offsets, mask=kv_mask, other=0.0)
        scores = tl.sum(k_block.to(tl.float32) * q[None, :], 1)
        if has_relative_bias:
            scores += tl.load(relative_bias + h * relative_bias_stride + stop - c, mask=key_mask, other=0.0).to(tl.float32)
        running_max, running_sum, accumulator = online_softmax(running_max, running_sum, accumulator, tl.where(key_mask, scores, float("-inf")), v_block)
        k_block = k_next
        v_block = v_next
    store_output(out, partials, r * heads + h, split, running_max, running_sum, accumulator, d, dim_mask, head_dim, splits)


@jit  # type: ignore[untyped-decorator]
def _paged_cross_attention_kernel(q, keys, values, out, slot_table, table_rows, source_lengths, table_stride, scale, heads: tl.constexpr, kv_heads: tl.constexpr,  # type: ignore
                   head_dim: tl.constexpr, padded_dim: tl.constexpr, page_size: tl.constexpr, use_pdl: tl.constexpr, block: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    kv_head = h // (heads // kv_heads)
    d = tl.arange(0, padded_dim)
    dim_mask = d < head_dim
    table_row = tl.load(table_rows + r)
    length = tl.load(source_lengths + table_row)
    slot_pointer = slot_table + table_row * table_stride
    lane = tl.arange(0, block)
    running_max = tl.full([], -1e30, tl.float32)  # not -∞: a row may look at nothing
    running_sum = tl.full([], 0.0, tl.float32)
    accumulator = tl.zeros([padded_dim], tl.float32)
    offsets = _slot_offset(tl.load(slot_pointer + lane, mask=lane < length, other=0), kv_head, kv_heads, head_dim, page_size)[:, None] + d[None, :]
    kv_mask = (lane < length)[:, None] & dim_mask[None, :]
    k_block = tl.load(keys + offsets, mask=kv_mask, other=0.0)  # the source is there before the query is
    v_block = tl.load(values + offsets, mask=kv_mask, other=0.0)
    if use_pdl:
        gdc_wait()
    query = tl.load(q + (r * heads + h) * head_dim + d, mask=dim_mask, other=0.0).to(tl.float32) * scale
    for begin in range(0, length, block):
        c = begin + lane
        next_c = c + block
        offsets = _slot_offset(tl.load(slot_pointer + next_c, mask=next_c < length, other=0), kv_head, kv_heads, head_dim, page_size)[:, None] + d[None, :]
        kv_mask = (next_c < length)[:, None] & dim_mask[None, :]
        k_next = tl.load(keys + offsets, mask=kv_mask, other=0.0)
        v_next = tl.load(values + offsets, mask=kv_mask, other=0.0)
        scores = tl.where(c < length, tl.sum(k_block.to(tl.float32) * query[None, :], 1), float("-inf"))
        running_max, running_sum, accumulator = online_softmax(running_max, running_sum, accumulator, scores, v_block)
        k_block = k_next
        v_block = v_next
    tl.store(out + (r * heads + h) * head_dim + d, (accumulator / tl.maximum(running_sum, 1e-30)).to(out.dtype.element_ty), mask=dim_mask)
