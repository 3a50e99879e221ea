"""Attention of inference/ops_triton.py: one token for each row looks at its own text, or at the source. kernels/decode_attention_paged.py shares the parts.

A kernel finds out which keys and values it needs and asks for them before its query is there; then it reads block by block, the
next one on its way while the sums of softmax run over this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.inference.ops_torch import DecodeContext
from keepleft.kernels.triton_compat import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl_kwargs,
    tl,
)
from keepleft.nn.attention import AttentionConfig

TOKENS_PER_SPLIT = 512  # tokens of a text that one program looks at


def block_config(programs: int, head_dim: int) -> tuple[int, int]:
    """How many tokens a program looks at at once, and with how many warps: large pieces only where there are few programs."""
    return (32, 1) if programs > 264 else (max(16, 8192 // next_power_of_2(head_dim)), 4)


def self_attention(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext, config: AttentionConfig, window: int) -> Tensor:
    """Self-attention of one token for each row over its own text; its key and value are written on the way."""
    rows, capacity, head_dim = len(qkv), len(keys), config.head_dim
    out = torch.empty(rows, config.heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    splits, partials = split_kv(out, capacity, window, config)
    rotary, placeholder = context.rotary, context.position
    block, warps = block_config(rows * config.heads, head_dim)
    _self_attention_kernel[(rows, config.heads, splits)](
        qkv, keys, values, out, partials, context.position, placeholder if context.starts is None else context.starts,
        placeholder if context.beam_rows is None else context.beam_rows, qkv if context.relative_bias is None else context.relative_bias,
        qkv if rotary is None else rotary.cosines, qkv if rotary is None else rotary.sines,
        0 if context.relative_bias is None else context.relative_bias.shape[1], 0 if rotary is None or len(rotary.cosines) == 1 else rotary.cosines.stride(0),
        rows, config.softmax_scale, config.heads, config.kv_heads, head_dim, next_power_of_2(head_dim), context.starts is not None, context.beam_rows is not None,
        context.relative_bias is not None, rotary is not None, window, splits, qkv.is_cuda, block, num_warps=warps, **pdl_kwargs(qkv))
    if splits > 1:
        combine_splits(partials, out, splits, config)
    return out


def split_kv(out: Tensor, max_length: int, window: int, config: AttentionConfig) -> tuple[int, Tensor]:
    """How many programs look at one text, and room for what each found, its highest score and its sum."""
    splits = max(1, min(32, cdiv(min(max_length, window) if window else max_length, TOKENS_PER_SPLIT)))
    if splits == 1:
        return 1, out
    return splits, torch.empty(len(out), config.heads, splits, config.head_dim + 2, dtype=torch.float32, device=out.device)


def combine_splits(partials: Tensor, out: Tensor, splits: int, config: AttentionConfig) -> None:
    """What several programs found of one text, put together."""
    _combine_splits_kernel[(len(out), config.heads)](partials, out, splits, out.is_cuda, next_power_of_2(splits), config.heads, config.head_dim,
                                            next_power_of_2(config.head_dim), num_warps=2, **pdl_kwargs(out))


def cross_attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, config: AttentionConfig) -> Tensor:
    """Cross-attention of one token for each row over its source."""
    out = torch.empty_like(q)
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    block, warps = block_config(len(q) * config.heads, config.head_dim)
    _cross_attention_kernel[(len(q), config.heads)](
        q, keys, values, q if bias is None else bias, out, len(q) // len(keys), keys.shape[2], *keys.stride()[:3],
        config.softmax_scale, config.heads, config.heads // config.kv_heads, config.head_dim, next_power_of_2(config.head_dim), bias is not None,
        q.is_cuda, block, num_warps=warps, **pdl_kwargs(q))
    return out


@jit  # type: ignore[untyped-decorator]
def split_range(begin, stop, split, window: tl.constexpr, splits: tl.constexpr):  # type: ignore
    """Which of the tokens from `begin` to `stop` a program looks at."""
    if window > 0:
        begin = tl.maximum(begin, stop - window + 1)
    size = stop - begin
    if splits > 1:
        size = (size + splits - 1) // splits
        begin += split * size
    return begin, tl.minimum(stop, begin + size)


@jit  # type: ignore[untyped-decorator]
def load_rotated(head_pointer, r, cosines, sines, rotary_stride, d, dim_mask, head_dim: tl.constexpr, has_rotary: tl.constexpr):  # type: ignore
    """The numbers of one head, each pair (i, i + width / 2) turned by its angle."""
    x = tl.load(head_pointer + d, mask=dim_mask, other=0.0).to(tl.float32)
    if has_rotary:
        pair_offset = tl.where(d < head_dim // 2, head_dim // 2, -(head_dim // 2))
        sign = tl.where(d < head_dim // 2, -1.0, 1.0)
        cosine = tl.load(cosines + r * rotary_stride + d, mask=dim_mask, other=0.0).to(tl.float32)
        sine = tl.load(sines + r * rotary_stride + d, mask=dim_mask, other=0.0).to(tl.float32) * sign
        x = x * cosine + tl.load(head_pointer + d + pair_offset, mask=dim_mask, other=0.0).to(tl.float32) * sine
    return x


@jit  # type: ignore[untyped-decorator]
def store_kv(keys, values, offsets, k, v, dim_mask, is_writer):  # type: ignore
    """The token's own key and value, written for later steps by one of the programs that know them."""
    if is_writer:
        tl.store(keys + offsets, k.to(keys.dtype.element_ty), mask=dim_mask)
        tl.store(values + offsets, v.to(values.dtype.element_ty), mask=dim_mask)


@jit  # type: ignore[untyped-decorator]
def softmax_of_self(q, k, v, relative_bias, split, has_relative_bias: tl.constexpr, splits: tl.constexpr):  # type: ignore
    """Where softmax begins: with the token itself, which is the first program's."""
    running_max = tl.sum(q * k, 0)
    if has_relative_bias:
        running_max += tl.load(relative_bias).to(tl.float32)
    running_sum = tl.full([], 1.0, tl.float32)
    accumulator = v
    if splits > 1:  # noqa: SIM102  (one is known when the kernel is compiled, the other is not)
        if split > 0:
            running_max = float("-inf")
            running_sum = 0.0
            accumulator = v * 0.0
    return running_max, running_sum, accumulator


@jit  # type: ignore[untyped-decorator]
def online_softmax(running_max, running_sum, accumulator, scores, v_block):  # type: ignore
    """Softmax so far (highest score, sum, what was found), and a block more."""
    new_max = tl.maximum(running_max, tl.max(scores, 0))
    weights = tl.exp(scores - new_max)
    rescale = tl.exp(running_max - new_max)
    return new_max, running_sum * rescale + tl.sum(weights, 0), accumulator * rescale + tl.sum(weights[:, None] * v_block.to(tl.float32), 0)


@jit  # type: ignore[untyped-decorator]
def store_output(out, partials, head_index, split, running_max, running_sum, accumulator, d, dim_mask, head_dim: tl.constexpr, splits: tl.constexpr):  # type: ignore
    """What was found, or a program's part of it."""
    if splits == 1:
        tl.store(out + head_index * head_dim + d, (accumulator / running_sum).to(out.dtype.element_ty), mask=dim_mask)
    else:
        base = partials + (head_index * splits + split) * (head_dim + 2)
        tl.store(base + d, accumulator, mask=dim_mask)
        tl.store(base + head_dim, running_max)
        tl.store(base + head_dim + 1, running_sum)


@jit  # type: ignore[untyped-decorator]
def _self_attention_kernel(qkv, keys, values, out, partials, position, starts, beam_rows, relative_bias, cosines, sines, relative_bias_stride, rotary_stride, rows,  # type: ignore
                 scale, heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, has_starts: tl.constexpr,
                 has_beam_rows: tl.constexpr, has_relative_bias: tl.constexpr, has_rotary: tl.constexpr, window: tl.constexpr, splits: tl.constexpr,
                 use_pdl: tl.constexpr, block: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = h // (heads // kv_heads)
    row_stride = kv_heads * head_dim  # from one row of the buffers to the next
    d = tl.arange(0, padded_dim)
    dim_mask = d < head_dim
    # what earlier steps wrote is there before this step's own query is
    stop = tl.load(position)
    begin = stop * 0
    if has_starts:
        begin = tl.load(starts + r)
    begin, end = split_range(begin, stop, split, window, splits)
    lane = tl.arange(0, block)
    c = begin + lane
    key_mask = c < end
    buffer_row = r + c * 0
    if has_beam_rows:
        buffer_row = tl.load(beam_rows + c * rows + r, mask=key_mask, other=0)
    offsets = ((c * rows + buffer_row) * row_stride + kv_head * head_dim)[:, None] + d[None, :]
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
    store_kv(keys, values, (stop * rows + r) * row_stride + kv_head * head_dim + d, k, v, dim_mask, (split == 0) & (h % (heads // kv_heads) == 0))
    running_max, running_sum, accumulator = softmax_of_self(q, k, v, relative_bias + h * relative_bias_stride, split, has_relative_bias, splits)
    for column in range(begin, end, block):
        c = column + lane
        key_mask = c < end
        next_c = c + block
        buffer_row = r + c * 0
        if has_beam_rows:
            buffer_row = tl.load(beam_rows + next_c * rows + r, mask=next_c < end, other=0)
        offsets = ((next_c * rows + buffer_row) * row_stride + kv_head * head_dim)[:, None] + d[None, :]
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
def _combine_splits_kernel(partials, out, splits, use_pdl: tl.constexpr, padded_splits: tl.constexpr, heads: tl.constexpr, head_dim: tl.constexpr,  # type: ignore
                   padded_dim: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
        gdc_wait()
    head_index = tl.program_id(0) * heads + tl.program_id(1)
    s = tl.arange(0, padded_splits)
    d = tl.arange(0, padded_dim)
    base = partials + (head_index * splits + s) * (head_dim + 2)
    split_max = tl.load(base + head_dim, mask=s < splits, other=float("-inf"))
    rescale = tl.exp(split_max - tl.max(split_max, 0))
    exp_sum = tl.sum(tl.load(base + head_dim + 1, mask=s < splits, other=0.0) * rescale, 0)
    accumulator = tl.load(base[:, None] + d[None, :], mask=(s < splits)[:, None] & (d < head_dim)[None, :], other=0.0)
    accumulator = tl.sum(accumulator * rescale[:, None], 0) / exp_sum
    tl.store(out + head_index * head_dim + d, accumulator.to(out.dtype.element_ty), mask=d < head_dim)


@jit  # type: ignore[untyped-decorator]
def _cross_attention_kernel(q, keys, values, bias, out, rows_per_source, length, row_stride, head_stride, token_stride, scale,  # type: ignore
                   heads: tl.constexpr, group_size: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, has_bias: tl.constexpr,
                   use_pdl: tl.constexpr, block: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    source = r // rows_per_source
    d = tl.arange(0, padded_dim)
    dim_mask = d < head_dim
    base = source.to(tl.int64) * row_stride + (h // group_size) * head_stride
    lane = tl.arange(0, block)
    running_max = tl.full([], -1e30, tl.float32)  # not -∞: a block may hold no text
    running_sum = tl.full([], 0.0, tl.float32)
    accumulator = tl.zeros([padded_dim], tl.float32)
    offsets = base + lane[:, None] * token_stride + d[None, :]
    kv_mask = (lane < length)[:, None] & dim_mask[None, :]
    k_block = tl.load(keys + offsets, mask=kv_mask, other=0.0)  # the source is there before the query is
    v_block = tl.load(values + offsets, mask=kv_mask, other=0.0)
    if use_pdl:
        gdc_wait()
    query = tl.load(q + (r * heads + h) * head_dim + d, mask=dim_mask, other=0.0).to(tl.float32) * scale
    for begin in range(0, length, block):
        c = begin + lane
        key_mask = c < length
        offsets += block * token_stride
        kv_mask = (c + block < length)[:, None] & dim_mask[None, :]
        k_next = tl.load(keys + offsets, mask=kv_mask, other=0.0)
        v_next = tl.load(values + offsets, mask=kv_mask, other=0.0)
        scores = tl.sum(k_block.to(tl.float32) * query[None, :], 1)
        if has_bias:
            scores += tl.load(bias + source * length + c, mask=key_mask, other=0.0).to(tl.float32)
        running_max, running_sum, accumulator = online_softmax(running_max, running_sum, accumulator, tl.where(key_mask, scores, float("-inf")), v_block)
        k_block = k_next
        v_block = v_next
    tl.store(out + (r * heads + h) * head_dim + d, (accumulator / running_sum).to(out.dtype.element_ty), mask=dim_mask)
