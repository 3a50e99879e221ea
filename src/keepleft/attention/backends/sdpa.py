"""F.scaled_dot_product_attention: PyTorch's fused kernels.

The mask is lowered to what a kernel has built in (full, causal), a dense table, chunks of a sliding window,
or spans of padded and packed rows that are attended one by one.
"""

from __future__ import annotations

from contextlib import nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, full, window_size
from keepleft.attention.segment_spans import is_relative, split_rows

# With a dense mask cuDNN's backward pass may return NaN (since PyTorch 2.11,
# https://github.com/pytorch/pytorch/issues/196678), and its forward pass builds a plan for every new shape,
# which takes longer than several passes: 50 ms where others take 8.
SAFE_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_SINGLE_TABLE_TOKENS = 256  # up to this many tokens one dense mask costs less than several smaller calls


class BuiltinMask(Enum):
    """The masks that the kernel has built in."""

    FULL = "full"
    CAUSAL = "causal"


CAUSAL = BuiltinMask.CAUSAL  # attribute access on an Enum is slow, and attend() is called often


class DenseMask(NamedTuple):
    attn_mask: Tensor  # (B or 1, H or 1, Q, K) booleans, or a bias with −∞ where a key is not visible
    empty_queries: Tensor | None = None  # (B or 1, H or 1, Q, 1) queries whose output is zeroed afterwards


class ChunkedWindow(NamedTuple):
    """A sliding window over one long sequence: chunks of queries over their keys and the chunk before."""

    window: int
    first_chunk: Tensor  # (1, 1, size, size) booleans; a chunk is at least a window long
    later_chunks: Tensor  # (1, 1, size, 2 · size)


class RaggedRows(NamedTuple):
    """Packed or padded rows, each sequence attended by itself: (length, lowered mask), None for padding."""

    rows: tuple[RaggedRow, ...]


LoweredMask = BuiltinMask | DenseMask | ChunkedWindow | RaggedRows
RaggedRow = tuple[tuple[int, LoweredMask | None], ...]


def builtin_mask(mask: Mask, grid: Grid) -> BuiltinMask | None:
    """The built-in mask that is the same on this grid; None if there is none."""
    if not grid.is_plain:
        return None
    mask = mask.simplify(max(grid.start + grid.queries, grid.keys))
    if mask == full or (mask == causal and grid.queries == 1 and grid.start == grid.keys - 1):
        return BuiltinMask.FULL
    return BuiltinMask.CAUSAL if mask == causal and grid.is_square else None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> LoweredMask:
    if (builtin := builtin_mask(mask, grid)) is not None:
        return builtin
    on_cpu = device.type == "cpu"  # on a GPU one large call is faster than many small ones
    if (
        on_cpu
        and grid.is_square
        and grid.queries > MAX_SINGLE_TABLE_TOKENS
        and (row_runs := split_rows(mask, grid)) is not None
    ):
        lengths = {run.length for row in row_runs for run in row if run.real}
        masks_by_length = {n: lower(mask, Grid(n, n), batch, heads, device) for n in lengths}
        return RaggedRows(
            tuple(
                tuple((run.length, masks_by_length[run.length] if run.real else None) for run in row)
                for row in row_runs
            )
        )
    if (
        on_cpu
        and grid.is_plain
        and grid.is_square
        and is_relative(mask)
        and (window := window_size(mask)) is not None
    ):
        size = max(window, MAX_SINGLE_TABLE_TOKENS)
        if grid.queries > 2 * size:
            first, later = (
                Grid(size, keys, keys - size).table(mask, batch=batch, heads=heads, device=device)
                for keys in (size, 2 * size)
            )
            return ChunkedWindow(window, first, later)
    table = grid.table(mask, batch=batch, heads=heads, device=device)
    return DenseMask(table) if on_cpu else unmask_empty_queries(table)


def unmask_empty_queries(table: Tensor) -> DenseMask:
    """Let queries that see nothing see all keys, and zero them afterwards: some GPU kernels return NaN."""
    empty_queries = ~table.any(-1, keepdim=True)
    # in this order: a compiled model cannot ask whether a stream is being captured
    must_not_sync = torch.compiler.is_compiling() or (
        table.is_cuda and torch.cuda.is_current_stream_capturing()
    )
    if must_not_sync or bool(empty_queries.any()):
        return DenseMask(table | empty_queries, empty_queries)
    return DenseMask(table)


def add_bias(lowered_mask: LoweredMask, bias: Tensor) -> LoweredMask:
    if lowered_mask is BuiltinMask.FULL:
        return DenseMask(bias)
    if lowered_mask is BuiltinMask.CAUSAL:
        lowered_mask = DenseMask(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril())
    if isinstance(lowered_mask, ChunkedWindow):  # a bias is dense anyway
        positions = torch.arange(bias.shape[-1], device=bias.device)
        distance = positions[:, None] - positions
        lowered_mask = DenseMask((distance >= 0) & (distance < lowered_mask.window))
    if isinstance(lowered_mask, RaggedRows):
        return RaggedRows(
            tuple(
                _add_bias_to_row(row, bias[min(n, len(bias) - 1)][None])
                for n, row in enumerate(lowered_mask.rows)
            )
        )
    assert isinstance(lowered_mask, DenseMask)
    if lowered_mask.attn_mask.dtype == torch.bool:
        return DenseMask(bias.masked_fill(~lowered_mask.attn_mask, float("-inf")), lowered_mask.empty_queries)
    # the mask is already folded into a bias
    return DenseMask(lowered_mask.attn_mask + bias, lowered_mask.empty_queries)


def _add_bias_to_row(row: RaggedRow, bias: Tensor) -> RaggedRow:
    out: list[tuple[int, LoweredMask | None]] = []
    end = 0
    for length, lowered_mask in row:
        begin, end = end, end + length
        if lowered_mask is not None:
            lowered_mask = add_bias(lowered_mask, bias[:, :, begin:end, begin:end])
        out.append((length, lowered_mask))
    return tuple(out)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lowered_mask: LoweredMask, scale: float, dropout: float
) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(lowered_mask, BuiltinMask):
        with (
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, *SAFE_BACKENDS])
            if q.is_cuda and not torch.is_grad_enabled()
            else nullcontext()
        ):
            out = F.scaled_dot_product_attention(
                q, k, v, None, dropout, lowered_mask is CAUSAL, scale=scale, enable_gqa=is_grouped
            )
        return match_grad_layout(out)
    if isinstance(lowered_mask, DenseMask):
        attn_mask, empty_queries = lowered_mask
        if attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(q.dtype)
        with sdpa_kernel(SAFE_BACKENDS) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask, dropout, scale=scale, enable_gqa=is_grouped
            )
        out = match_grad_layout(out)
        return out if empty_queries is None else out.masked_fill(empty_queries, 0.0)
    if isinstance(lowered_mask, ChunkedWindow):
        return _attend_chunked_window(q, k, v, lowered_mask, scale, dropout)
    return torch.stack(
        [_attend_row(*row, scale, dropout) for row in zip(q, k, v, lowered_mask.rows, strict=True)]
    )


def _attend_row(q: Tensor, k: Tensor, v: Tensor, row: RaggedRow, scale: float, dropout: float) -> Tensor:
    """(H, T, D) of one row.

    One split and one cat: each slice taken or written alone would cost a full row in the backward pass.
    """
    lengths = [length for length, _ in row]
    parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), row, strict=True)
    return torch.cat(
        [
            torch.zeros_like(q_part)
            if lowered_mask is None
            else attend(q_part[None], k_part[None], v_part[None], lowered_mask, scale, dropout)[0]
            for q_part, k_part, v_part, (_, lowered_mask) in parts
        ],
        1,
    )


def _attend_chunked_window(
    q: Tensor, k: Tensor, v: Tensor, lowered_mask: ChunkedWindow, scale: float, dropout: float
) -> Tensor:
    size = lowered_mask.first_chunk.shape[-1]
    out = []
    chunks = list(zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True))
    for n, (q_chunk, k_chunk, v_chunk) in enumerate(chunks):
        if n:
            k_chunk = torch.cat([chunks[n - 1][1], k_chunk], 2)
            v_chunk = torch.cat([chunks[n - 1][2], v_chunk], 2)
        table = lowered_mask.later_chunks if n else lowered_mask.first_chunk
        table = table[:, :, : q_chunk.shape[2], : k_chunk.shape[2]]  # the last chunk may be shorter
        out.append(attend(q_chunk, k_chunk, v_chunk, DenseMask(table), scale, dropout))
    return torch.cat(out, 2)


def match_grad_layout(out: Tensor) -> Tensor:
    """On a GPU: make the gradient of `out` arrive with the strides of `out`.

    cuDNN's backward pass caches its plan by shape and not by the layout of the gradient (PyTorch 2.11): after
    one call with another layout its gradients are silently wrong. In our models the layouts agree, and this
    costs nothing.
    """
    return _MatchGradLayout.apply(out) if out.is_cuda and out.requires_grad else out


class _MatchGradLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.strides = out.stride()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if gradient.stride() == ctx.strides:
            return gradient
        grad_copy = torch.empty_strided(
            gradient.shape, ctx.strides, dtype=gradient.dtype, device=gradient.device
        )
        return grad_copy.copy_(gradient)
