"""FlexAttention: the predicate itself, compiled into the kernel on a GPU. Its form: a BlockMask and a bias."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask
from keepleft.attention.runs import borders


class Form(NamedTuple):
    blocks: BlockMask
    bias: Tensor | None = None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Form:
    if grid.plain:
        mask = mask.within(max(grid.start + grid.queries, grid.keys))
        if mask.uniform:
            return Form(_plain(mask, grid, device))
    elif borders(mask, grid) is not None:  # within a text slots are as far apart as positions: no need to look those up
        grid = replace(grid, q_pos=None, k_pos=None)
    return Form(_blocks(mask, grid, batch, None if mask.uniform else heads, device))


def _blocks(mask: Mask, grid: Grid, batch: int | None, heads: int | None, device: torch.device) -> BlockMask:
    return create_block_mask(grid.predicate(mask, device), batch, heads, grid.queries, grid.keys, device=device)


@lru_cache(maxsize=64)
def _plain(mask: Mask, grid: Grid, device: torch.device) -> BlockMask:
    """Where nothing depends on the batch, worked out once."""
    return _blocks(mask, grid, None, None, device)


def plus(form: Form, bias: Tensor) -> Form:
    return form._replace(bias=bias if form.bias is None else form.bias + bias)


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float, dropout: float) -> Tensor:
    if dropout:
        raise ValueError(f"FlexAttention has no dropout ({dropout} was asked for): use backend='sdpa'")
    add = None
    if form.bias is not None:
        bias, rows, heads = form.bias.to(q.dtype), form.bias.shape[0] > 1, form.bias.shape[1] > 1

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[b if rows else 0, h if heads else 0, i, j]

    kernel = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else _eager
    out: Tensor = kernel(q, k, v, add, form.blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _eager(*arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return flex_attention(*arguments, **options)
