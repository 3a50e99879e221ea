"""PyTorch's fused kernels. Their form: everything, a triangle, a table, or runs of tokens attended one by one."""

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
from keepleft.attention.runs import relative, runs_of

# With a table cuDNN's backward pass may answer NaN (since PyTorch 2.11, https://github.com/pytorch/pytorch/issues/196678),
# and its forward pass makes a plan for every new shape, which takes longer than several passes: 50 ms where others take 8
SAFE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SMALL = 256  # up to this many tokens a table costs less than the calls it would save


class Whole(Enum):
    """What the kernel knows by itself."""

    EVERYTHING = "everything"
    TRIANGLE = "triangle"


TRIANGLE = Whole.TRIANGLE  # an enumeration is slow to open, and attend() is called often


class Table(NamedTuple):
    seen: Tensor                 # (B or 1, H or 1, Q, K) booleans, or a bias with −∞ where nothing is seen
    blind: Tensor | None = None  # (B or 1, H or 1, Q, 1) queries to be emptied afterwards


class Bands(NamedTuple):
    """A causal window over one long text: chunks of queries, each over its own tokens and those of the chunk before."""

    window: int
    first: Tensor   # (1, 1, size, size) booleans; a chunk is at least a window long
    others: Tensor  # (1, 1, size, 2 · size)


class Runs(NamedTuple):
    """Texts that lie one after the other, each attended alone: the lengths and forms in each row; None is padding."""

    rows: tuple[Row, ...]


Form = Whole | Table | Bands | Runs
Row = tuple[tuple[int, Form | None], ...]


def known(mask: Mask, grid: Grid) -> Whole | None:
    """What the kernel can do without a table, if it can."""
    if not grid.plain:
        return None
    mask = mask.within(max(grid.start + grid.queries, grid.keys))
    if mask == full or (mask == causal and grid.queries == 1 and grid.start == grid.keys - 1):
        return Whole.EVERYTHING
    return Whole.TRIANGLE if mask == causal and grid.square else None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Form:
    if (whole := known(mask, grid)) is not None:
        return whole
    on_cpu = device.type == "cpu"  # a GPU would rather have one large call than many small ones
    if on_cpu and grid.square and grid.queries > SMALL and (runs := runs_of(mask, grid)) is not None:
        lengths = {run.length for row in runs for run in row if run.real}
        forms = {n: lower(mask, Grid(n, n), batch, heads, device) for n in lengths}
        return Runs(tuple(tuple((run.length, forms[run.length] if run.real else None) for run in row) for row in runs))
    if on_cpu and grid.plain and grid.square and relative(mask) and (near := window_size(mask)) is not None:
        size = max(near, SMALL)
        if grid.queries > 2 * size:
            return Bands(near, *(Grid(size, keys, keys - size).table(mask, batch=batch, heads=heads, device=device)
                                 for keys in (size, 2 * size)))
    table = grid.table(mask, batch=batch, heads=heads, device=device)
    return Table(table) if on_cpu else open_eyed(table)


def open_eyed(table: Tensor) -> Table:
    """On a GPU some kernels answer a query that sees nothing with NaN: let it see everything, and empty it afterwards."""
    blind = ~table.any(-1, keepdim=True)
    unknown = torch.compiler.is_compiling() or (table.is_cuda and torch.cuda.is_current_stream_capturing())
    return Table(table | blind, blind) if unknown or bool(blind.any()) else Table(table)


def plus(form: Form, bias: Tensor) -> Form:
    if form is Whole.EVERYTHING:
        return Table(bias)
    if form is Whole.TRIANGLE:
        form = Table(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril())
    if isinstance(form, Bands):  # a bias is a table of all pairs anyway
        place = torch.arange(bias.shape[-1], device=bias.device)
        apart = place[:, None] - place
        form = Table((apart >= 0) & (apart < form.window))
    if isinstance(form, Runs):
        return Runs(tuple(_plus(row, bias[min(n, len(bias) - 1)][None]) for n, row in enumerate(form.rows)))
    assert isinstance(form, Table)
    if form.seen.dtype == torch.bool:
        return Table(bias.masked_fill(~form.seen, float("-inf")), form.blind)
    return Table(form.seen + bias, form.blind)  # there is a bias in it already


def _plus(row: Row, bias: Tensor) -> Row:
    out, end = [], 0
    for length, form in row:
        begin, end = end, end + length
        out.append((length, None if form is None else plus(form, bias[:, :, begin:end, begin:end])))
    return tuple(out)


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float, dropout: float) -> Tensor:
    groups = q.shape[1] != k.shape[1]
    if isinstance(form, Whole):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *SAFE]) if q.is_cuda and not torch.is_grad_enabled() else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, None, dropout, form is TRIANGLE, scale=scale, enable_gqa=groups)
        return steady(out)
    if isinstance(form, Table):
        seen = form.seen if form.seen.dtype == torch.bool else form.seen.to(q.dtype)
        with sdpa_kernel(SAFE) if q.is_cuda else nullcontext():
            out = steady(F.scaled_dot_product_attention(q, k, v, seen, dropout, scale=scale, enable_gqa=groups))
        return out if form.blind is None else out.masked_fill(form.blind, 0.0)
    if isinstance(form, Bands):
        return _banded(q, k, v, form, scale, dropout)
    return torch.stack([_one_by_one(*row, scale, dropout) for row in zip(q, k, v, form.rows, strict=True)])


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, row: Row, scale: float, dropout: float) -> Tensor:
    """(H, T, D) of one row. Split and joined at once: each slice taken or written alone costs a whole row going back."""
    lengths = [length for length, _ in row]
    parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), row, strict=True)
    return torch.cat([torch.zeros_like(a) if form is None else attend(a[None], b[None], c[None], form, scale, dropout)[0]
                      for a, b, c, (_, form) in parts], 1)


def _banded(q: Tensor, k: Tensor, v: Tensor, form: Bands, scale: float, dropout: float) -> Tensor:
    size, out = form.first.shape[-1], []
    parts = list(zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True))
    for n, (a, b, c) in enumerate(parts):
        if n:
            b, c = torch.cat([parts[n - 1][1], b], 2), torch.cat([parts[n - 1][2], c], 2)
        seen = (form.others if n else form.first)[:, :, :a.shape[2], :b.shape[2]]  # the last chunk may be shorter
        out.append(attend(a, b, c, Table(seen), scale, dropout))
    return torch.cat(out, 2)


def steady(out: Tensor) -> Tensor:
    """On a GPU: see to it that the gradient of `out` comes back laid out as `out` is.

    cuDNN's backward pass remembers its plan by shape and not by the layout of the gradient (PyTorch 2.11): after one call
    with another layout its gradients are silently wrong. In our models the layouts agree, and this costs nothing.
    """
    return _Steady.apply(out) if out.is_cuda and out.requires_grad else out


class _Steady(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.strides = out.stride()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if gradient.stride() == ctx.strides:
            return gradient
        laid = torch.empty_strided(gradient.shape, ctx.strides, dtype=gradient.dtype, device=gradient.device)
        return laid.copy_(gradient)
