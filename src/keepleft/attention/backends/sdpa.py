"""PyTorch's fused kernels. Their form: everything, a triangle, a table, or runs of tokens attended one by one."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

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


class Runs(NamedTuple):
    """Texts that lie one after the other, each attended alone."""

    runs: tuple[tuple[Run, Form], ...]


Form = Whole | Tensor | Runs


def known(mask: Mask, grid: Grid) -> Whole | None:
    """What the kernel can do without a table, if it can."""
    if not grid.plain:
        return None
    mask = mask.within(grid.start + max(grid.queries, grid.keys))
    if mask == full or (mask == causal and grid.queries == 1 and grid.start == grid.keys - 1):
        return Whole.EVERYTHING
    return Whole.TRIANGLE if mask == causal and grid.square else None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Form:
    if (whole := known(mask, grid)) is not None:
        return whole
    if grid.square and grid.queries > SMALL and (runs := runs_of(mask, grid)) is not None:
        forms = {n: lower(mask, Grid(n, n), batch, heads, device) for n in {run.end - run.begin for run in runs}}
        return Runs(tuple((run, forms[run.end - run.begin]) for run in runs))
    return grid.table(mask, batch=batch, heads=heads, device=device)


def plus(form: Form, bias: Tensor) -> Form:
    if form is Whole.EVERYTHING:
        return bias
    if form is Whole.TRIANGLE:
        form = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if isinstance(form, Runs):
        def part(run: Run) -> Tensor:
            rows = bias if bias.shape[0] == 1 else bias[run.rows]
            return rows[:, :, run.begin:run.end, run.begin:run.end]
        return Runs(tuple((run, plus(inner, part(run))) for run, inner in form.runs))
    assert isinstance(form, Tensor)
    if form.dtype == torch.bool:
        return bias.masked_fill(~form, float("-inf"))
    return form + bias  # a table with a bias already in it


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float, dropout: float) -> Tensor:
    if isinstance(form, Runs):
        out = torch.zeros_like(q)  # padding sees nothing and gets zeros
        for run, inner in form.runs:
            some_q, some_k, some_v = (t[run.rows, :, run.begin:run.end] for t in (q, k, v))
            out[run.rows, :, run.begin:run.end] = attend(some_q, some_k, some_v, inner, scale, dropout)
        return out
    mask = form if isinstance(form, Tensor) else None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, form is Whole.TRIANGLE, scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1])
