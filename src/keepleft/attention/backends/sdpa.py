"""PyTorch's fused kernels. Their form: everything, a triangle, a table, or runs of tokens attended one by one."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, full
from keepleft.attention.runs import Run, runs_of

SMALL = 256  # up to this many tokens a table costs less than the calls it would save


class Whole(Enum):
    """What the kernel knows by itself."""

    EVERYTHING = "everything"
    TRIANGLE = "triangle"


class Table(NamedTuple):
    seen: Tensor                 # (B or 1, H or 1, Q, K) booleans, or a bias with −∞ where nothing is seen
    blind: Tensor | None = None  # (B or 1, H or 1, Q, 1) queries to be emptied afterwards


class Runs(NamedTuple):
    """Texts that lie one after the other, each attended alone."""

    runs: tuple[tuple[Run, Form], ...]


Form = Whole | Table | Runs


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
        forms = {n: lower(mask, Grid(n, n), batch, heads, device) for n in {run.end - run.begin for run in runs}}
        return Runs(tuple((run, forms[run.end - run.begin]) for run in runs))
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
    if isinstance(form, Runs):
        def part(run: Run) -> Tensor:
            rows = bias if bias.shape[0] == 1 else bias[run.rows]
            return rows[:, :, run.begin:run.end, run.begin:run.end]
        return Runs(tuple((run, plus(inner, part(run))) for run, inner in form.runs))
    assert isinstance(form, Table)
    if form.seen.dtype == torch.bool:
        return Table(bias.masked_fill(~form.seen, float("-inf")), form.blind)
    return Table(form.seen + bias, form.blind)  # there is a bias in it already


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float, dropout: float) -> Tensor:
    groups = q.shape[1] != k.shape[1]
    if isinstance(form, Whole):
        out = F.scaled_dot_product_attention(q, k, v, None, dropout, form is Whole.TRIANGLE, scale=scale, enable_gqa=groups)
        return steady(out)
    if isinstance(form, Table):
        seen = form.seen if form.seen.dtype == torch.bool else form.seen.to(q.dtype)
        out = steady(F.scaled_dot_product_attention(q, k, v, seen, dropout, scale=scale, enable_gqa=groups))
        return out if form.blind is None else out.masked_fill(form.blind, 0.0)
    out = torch.zeros_like(q)  # padding sees nothing and gets zeros
    for run, inner in form.runs:
        some_q, some_k, some_v = (t[run.rows, :, run.begin:run.end] for t in (q, k, v))
        out[run.rows, :, run.begin:run.end] = attend(some_q, some_k, some_v, inner, scale, dropout)
    return out


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
