"""Decode attention in Triton: one query per row over its own sequence, or over its source (split-KV flash
decoding).

Keys and values are contiguous or paged; only the address of a token differs, so each kernel serves both
(`paged`). A kernel works out which keys and values it needs and fetches the first block before its query is
there; then it goes block by block, the next one on its way while the online softmax runs over this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.kernels.triton_compat import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl_kwargs,
    tl,
)

TOKENS_PER_SPLIT = 512  # tokens of a sequence that one program attends to
MAX_SPLITS = 32


def self_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    position: Tensor,
    window: int = 0,
    starts: Tensor | None = None,
    beam_rows: Tensor | None = None,
    slot_table: Tensor | None = None,
    table_rows: Tensor | None = None,
    write_slots: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """(R, (H + 2 Hk) · D) → (R, H · D): each row attends to its sequence; its own key and value are written
    on the way.

    Contiguous: keys and values (capacity, R, Hk, D); `position` (1,), `starts` (R,) and `beam_rows`
    (capacity, R) as in inference/ops.py. Paged, if there is a `slot_table`: (pages, Hk, page_size, D);
    `position`, `table_rows` and `write_slots` are (R,). `window` 0: none.
    """
    rows = len(qkv)
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    paged = slot_table is not None
    max_length = len(keys) if slot_table is None else slot_table.shape[1]
    out = torch.empty(rows, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    splits = max(
        1, min(MAX_SPLITS, cdiv(min(max_length, window) if window else max_length, TOKENS_PER_SPLIT))
    )
    partials = out  # unused where one program attends to all of a sequence
    if splits > 1:
        partials = torch.empty(rows, heads, splits, head_dim + 2, dtype=torch.float32, device=out.device)
    block, warps = _block_config(rows * heads, head_dim)
    cosines, sines = (qkv, qkv) if rotary is None else rotary
    slots = slot_table if paged else beam_rows
    _self_attention_kernel[(rows, heads, splits)](
        qkv,
        keys,
        values,
        out,
        partials,
        position,
        position if starts is None else starts,
        position if slots is None else slots,
        position if table_rows is None else table_rows,
        position if write_slots is None else write_slots,
        qkv if relative_bias is None else relative_bias,
        cosines,
        sines,
        0 if slot_table is None else slot_table.stride(0),
        0 if relative_bias is None else relative_bias.shape[1],
        0 if rotary is None or len(cosines) == 1 else cosines.stride(0),
        rows,
        scale,
        heads,
        kv_heads,
        head_dim,
        next_power_of_2(head_dim),
        keys.shape[2] if paged else 0,
        paged,
        starts is not None,
        beam_rows is not None,
        relative_bias is not None,
        rotary is not None,
        window,
        splits,
        qkv.is_cuda,
        block,
        num_warps=warps,
        **pdl_kwargs(qkv),
    )
    if splits > 1:
        _combine_splits_kernel[(rows, heads)](
            partials,
            out,
            splits,
            out.is_cuda,
            next_power_of_2(splits),
            heads,
            head_dim,
            next_power_of_2(head_dim),
            num_warps=2,
            **pdl_kwargs(out),
        )
    return out


def cross_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    bias: Tensor | None = None,
    slot_table: Tensor | None = None,
    table_rows: Tensor | None = None,
    source_lengths: Tensor | None = None,
) -> Tensor:
    """(R, H · D) → (R, H · D): each row attends to its source.

    Contiguous: keys and values (B, Hk, S, D) that R / B neighbours share, `bias` (B, S) is added to the
    scores. Paged, if there is a `slot_table`: (pages, Hk, page_size, D), `table_rows` (R,), `source_lengths`
    by table row.
    """
    out = torch.empty_like(q)
    head_dim = q.shape[1] // heads
    paged = slot_table is not None
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    block, warps = _block_config(len(q) * heads, head_dim)
    _cross_attention_kernel[(len(q), heads)](
        q,
        keys,
        values,
        out,
        q if bias is None else bias,
        q if slot_table is None else slot_table,
        q if table_rows is None else table_rows,
        q if source_lengths is None else source_lengths,
        1 if paged else len(q) // len(keys),
        0 if paged else keys.shape[2],
        *keys.stride()[:3],
        0 if slot_table is None else slot_table.stride(0),
        scale,
        heads,
        kv_heads,
        head_dim,
        next_power_of_2(head_dim),
        keys.shape[2] if paged else 0,
        paged,
        bias is not None,
        q.is_cuda,
        block,
        num_warps=warps,
        **pdl_kwargs(q),
    )
    return out


def _block_config(programs: int, head_dim: int) -> tuple[int, int]:
    """Tokens that a program attends to at once, and its warps: large blocks only where there are few
    programs.
    """
    return (32, 1) if programs > 264 else (max(16, 8192 // next_power_of_2(head_dim)), 4)


@jit
def split_range(begin, stop, split, window: tl.constexpr, splits: tl.constexpr):
    """Which of the tokens from `begin` to `stop` a program attends to."""
    if window > 0:
        begin = tl.maximum(begin, stop - window + 1)
    size = stop - begin
    if splits > 1:
        size = (size + splits - 1) // splits
        begin += split * size
    return begin, tl.minimum(stop, begin + size)


@jit
def slot_offset(slot, kv_head, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr):
    """Where a slot's numbers for one head start, in pages (pages, Hk, page_size, D)."""
    wide = slot.to(tl.int64)
    page = wide // page_size
    return (
        page * (kv_heads * page_size * head_dim)
        + kv_head * (page_size * head_dim)
        + (wide % page_size) * head_dim
    )


@jit
def token_offset(
    c,
    key_mask,
    r,
    rows,
    slots,
    kv_head,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    paged: tl.constexpr,
    has_beam_rows: tl.constexpr,
):
    """Where the keys and values of columns `c` of row `r` start, for one head.

    `slots`: the row's slot table where pages are used, else the table of beam rows.
    """
    if paged:
        offset = slot_offset(
            tl.load(slots + c, mask=key_mask, other=0), kv_head, kv_heads, head_dim, page_size
        )
    else:
        buffer_row = r + c * 0
        if has_beam_rows:
            buffer_row = tl.load(slots + c * rows + r, mask=key_mask, other=0)
        offset = (c * rows + buffer_row) * (kv_heads * head_dim) + kv_head * head_dim
    return offset


@jit
def load_rotated(
    head_pointer,
    r,
    cosines,
    sines,
    rotary_stride,
    d,
    dim_mask,
    head_dim: tl.constexpr,
    has_rotary: tl.constexpr,
):
    """The numbers of one head, each pair (i, i + head_dim / 2) rotated by its angle."""
    x = tl.load(head_pointer + d, mask=dim_mask, other=0.0).to(tl.float32)
    if has_rotary:
        partner = tl.where(d < head_dim // 2, head_dim // 2, -(head_dim // 2))
        sign = tl.where(d < head_dim // 2, -1.0, 1.0)
        cosine = tl.load(cosines + r * rotary_stride + d, mask=dim_mask, other=0.0).to(tl.float32)
        sine = tl.load(sines + r * rotary_stride + d, mask=dim_mask, other=0.0).to(tl.float32) * sign
        x = x * cosine + tl.load(head_pointer + d + partner, mask=dim_mask, other=0.0).to(tl.float32) * sine
    return x


@jit
def store_kv(keys, values, offsets, k, v, dim_mask, is_writer):
    """The token's own key and value, written for later steps by one of the programs that know them."""
    if is_writer:
        tl.store(keys + offsets, k.to(keys.dtype.element_ty), mask=dim_mask)
        tl.store(values + offsets, v.to(values.dtype.element_ty), mask=dim_mask)


@jit
def softmax_of_self(q, k, v, relative_bias, split, has_relative_bias: tl.constexpr, splits: tl.constexpr):
    """Where the online softmax starts: with the token itself, which belongs to the first program."""
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


@jit
def online_softmax(running_max, running_sum, accumulator, scores, v_block):
    """The softmax so far (highest score, sum of exponentials, weighted sum of values), and one block more."""
    new_max = tl.maximum(running_max, tl.max(scores, 0))
    weights = tl.exp(scores - new_max)
    rescale = tl.exp(running_max - new_max)
    new_sum = running_sum * rescale + tl.sum(weights, 0)
    return new_max, new_sum, accumulator * rescale + tl.sum(weights[:, None] * v_block.to(tl.float32), 0)


@jit
def store_output(
    out,
    partials,
    head_index,
    split,
    running_max,
    running_sum,
    accumulator,
    d,
    dim_mask,
    head_dim: tl.constexpr,
    splits: tl.constexpr,
):
    """The attention output, or one split's part of it with its maximum and sum."""
    if splits == 1:
        tl.store(
            out + head_index * head_dim + d,
            (accumulator / running_sum).to(out.dtype.element_ty),
            mask=dim_mask,
        )
    else:
        base = partials + (head_index * splits + split) * (head_dim + 2)
        tl.store(base + d, accumulator, mask=dim_mask)
        tl.store(base + head_dim, running_max)
        tl.store(base + head_dim + 1, running_sum)


@jit
def _self_attention_kernel(
    qkv,
    keys,
    values,
    out,
    partials,
    position,
    starts,
    slots,
    table_rows,
    write_slots,
    relative_bias,
    cosines,
    sines,
    table_stride,
    relative_bias_stride,
    rotary_stride,
    rows,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    paged: tl.constexpr,
    has_starts: tl.constexpr,
    has_beam_rows: tl.constexpr,
    has_relative_bias: tl.constexpr,
    has_rotary: tl.constexpr,
    window: tl.constexpr,
    splits: tl.constexpr,
    use_pdl: tl.constexpr,
    block: tl.constexpr,
):
    if use_pdl:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = h // (heads // kv_heads)
    d = tl.arange(0, padded_dim)
    dim_mask = d < head_dim
    # what earlier steps wrote is there before this step's own query is
    if paged:
        stop = tl.load(position + r)
        slots += tl.load(table_rows + r) * table_stride
    else:
        stop = tl.load(position)
    begin = stop * 0
    if has_starts:
        begin = tl.load(starts + r)
    begin, end = split_range(begin, stop, split, window, splits)
    lane = tl.arange(0, block)
    c = begin + lane
    key_mask = c < end
    offset = token_offset(
        c, key_mask, r, rows, slots, kv_head, kv_heads, head_dim, page_size, paged, has_beam_rows
    )
    offsets = offset[:, None] + d[None, :]
    kv_mask = key_mask[:, None] & dim_mask[None, :]
    k_block = tl.load(keys + offsets, mask=kv_mask, other=0.0)
    v_block = tl.load(values + offsets, mask=kv_mask, other=0.0)
    if use_pdl:
        gdc_wait()
    qkv += r * (heads + 2 * kv_heads) * head_dim
    q = (
        load_rotated(qkv + h * head_dim, r, cosines, sines, rotary_stride, d, dim_mask, head_dim, has_rotary)
        * scale
    )
    k_pointer = qkv + (heads + kv_head) * head_dim
    k = load_rotated(k_pointer, r, cosines, sines, rotary_stride, d, dim_mask, head_dim, has_rotary)
    k = k.to(keys.dtype.element_ty).to(tl.float32)
    v = tl.load(qkv + (heads + kv_heads + kv_head) * head_dim + d, mask=dim_mask, other=0.0).to(tl.float32)
    if paged:
        own_offset = slot_offset(tl.load(write_slots + r), kv_head, kv_heads, head_dim, page_size)
    else:
        own_offset = (stop * rows + r) * (kv_heads * head_dim) + kv_head * head_dim
    store_kv(keys, values, own_offset + d, k, v, dim_mask, (split == 0) & (h % (heads // kv_heads) == 0))
    relative_bias += h * relative_bias_stride
    running_max, running_sum, accumulator = softmax_of_self(
        q, k, v, relative_bias, split, has_relative_bias, splits
    )
    for column in range(begin, end, block):
        c = column + lane
        key_mask = c < end
        next_c = c + block
        next_mask = next_c < end
        offset = token_offset(
            next_c, next_mask, r, rows, slots, kv_head, kv_heads, head_dim, page_size, paged, has_beam_rows
        )
        offsets = offset[:, None] + d[None, :]
        kv_mask = next_mask[:, None] & dim_mask[None, :]
        k_next = tl.load(keys + offsets, mask=kv_mask, other=0.0)
        v_next = tl.load(values + offsets, mask=kv_mask, other=0.0)
        scores = tl.sum(k_block.to(tl.float32) * q[None, :], 1)
        if has_relative_bias:
            scores += tl.load(relative_bias + stop - c, mask=key_mask, other=0.0).to(tl.float32)
        scores = tl.where(key_mask, scores, float("-inf"))
        running_max, running_sum, accumulator = online_softmax(
            running_max, running_sum, accumulator, scores, v_block
        )
        k_block = k_next
        v_block = v_next
    store_output(
        out,
        partials,
        r * heads + h,
        split,
        running_max,
        running_sum,
        accumulator,
        d,
        dim_mask,
        head_dim,
        splits,
    )


@jit
def _combine_splits_kernel(
    partials,
    out,
    splits,
    use_pdl: tl.constexpr,
    padded_splits: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
):
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
    mask = (s < splits)[:, None] & (d < head_dim)[None, :]
    accumulator = tl.load(base[:, None] + d[None, :], mask=mask, other=0.0)
    accumulator = tl.sum(accumulator * rescale[:, None], 0) / exp_sum
    tl.store(out + head_index * head_dim + d, accumulator.to(out.dtype.element_ty), mask=d < head_dim)


@jit
def source_offset(
    c,
    key_mask,
    base,
    token_stride,
    slots,
    kv_head,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    paged: tl.constexpr,
):
    """Where the keys and values of columns `c` of a source start, for one head."""
    if paged:
        offset = slot_offset(
            tl.load(slots + c, mask=key_mask, other=0), kv_head, kv_heads, head_dim, page_size
        )
    else:
        offset = base + c * token_stride
    return offset


@jit
def _cross_attention_kernel(
    q,
    keys,
    values,
    out,
    bias,
    slots,
    table_rows,
    source_lengths,
    rows_per_source,
    length,
    row_stride,
    head_stride,
    token_stride,
    table_stride,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    paged: tl.constexpr,
    has_bias: tl.constexpr,
    use_pdl: tl.constexpr,
    block: tl.constexpr,
):
    if use_pdl:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    kv_head = h // (heads // kv_heads)
    source = r // rows_per_source
    base = source.to(tl.int64) * row_stride + kv_head * head_stride
    if paged:
        table_row = tl.load(table_rows + r)
        length = tl.load(source_lengths + table_row)
        slots += table_row * table_stride
    d = tl.arange(0, padded_dim)
    dim_mask = d < head_dim
    lane = tl.arange(0, block)
    # not -∞: a block may hold only padding, a row no source at all
    running_max = tl.full([], -1e30, tl.float32)
    running_sum = tl.full([], 0.0, tl.float32)
    accumulator = tl.zeros([padded_dim], tl.float32)
    key_mask = lane < length
    offset = source_offset(
        lane, key_mask, base, token_stride, slots, kv_head, kv_heads, head_dim, page_size, paged
    )
    kv_mask = key_mask[:, None] & dim_mask[None, :]
    # there before the query is
    k_block = tl.load(keys + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
    v_block = tl.load(values + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
    if use_pdl:
        gdc_wait()
    query = tl.load(q + (r * heads + h) * head_dim + d, mask=dim_mask, other=0.0).to(tl.float32) * scale
    for begin in range(0, length, block):
        c = begin + lane
        key_mask = c < length
        next_c = c + block
        next_mask = next_c < length
        offset = source_offset(
            next_c, next_mask, base, token_stride, slots, kv_head, kv_heads, head_dim, page_size, paged
        )
        kv_mask = next_mask[:, None] & dim_mask[None, :]
        k_next = tl.load(keys + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
        v_next = tl.load(values + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.sum(k_block.to(tl.float32) * query[None, :], 1)
        if has_bias:
            scores += tl.load(bias + source * length + c, mask=key_mask, other=0.0).to(tl.float32)
        scores = tl.where(key_mask, scores, float("-inf"))
        running_max, running_sum, accumulator = online_softmax(
            running_max, running_sum, accumulator, scores, v_block
        )
        k_block = k_next
        v_block = v_next
    attended = accumulator / tl.maximum(running_sum, 1e-30)
    tl.store(out + (r * heads + h) * head_dim + d, attended.to(out.dtype.element_ty), mask=dim_mask)
