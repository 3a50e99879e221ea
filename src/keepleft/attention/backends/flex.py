"""FlexAttention: the mask predicate itself, compiled into the kernel on a GPU.

The mask is lowered to a BlockMask and a bias.
"""

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
from keepleft.attention.segment_spans import segment_spans


class FlexMask(NamedTuple):
    block_mask: BlockMask
    bias: Tensor | None = None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> FlexMask:
    if grid.is_plain:
        mask = mask.simplify(max(grid.start + grid.queries, grid.keys))
        if mask.is_uniform:
            return FlexMask(_shared_block_mask(mask, grid, device))
    elif segment_spans(mask, grid) is not None:
        # within a sequence slots are as far apart as positions, so positions need not be looked up
        grid = replace(grid, q_pos=None, k_pos=None)
    return FlexMask(_make_block_mask(mask, grid, batch, None if mask.is_uniform else heads, device))


def _make_block_mask(
    mask: Mask, grid: Grid, batch: int | None, heads: int | None, device: torch.device
) -> BlockMask:
    return create_block_mask(
        grid.predicate(mask, device), batch, heads, grid.queries, grid.keys, device=device
    )


@lru_cache(maxsize=64)
def _shared_block_mask(mask: Mask, grid: Grid, device: torch.device) -> BlockMask:
    """Cached, since nothing in it depends on the batch."""
    return _make_block_mask(mask, grid, None, None, device)


def add_bias(lowered_mask: FlexMask, bias: Tensor) -> FlexMask:
    return lowered_mask._replace(bias=bias if lowered_mask.bias is None else lowered_mask.bias + bias)


def attend(q: Tensor, k: Tensor, v: Tensor, lowered_mask: FlexMask, scale: float, dropout: float) -> Tensor:
    if dropout:
        raise ValueError(f"FlexAttention has no dropout ({dropout} was asked for): use backend='sdpa'")
    score_mod = None
    if lowered_mask.bias is not None:
        bias = lowered_mask.bias.to(q.dtype)
        per_row = lowered_mask.bias.shape[0] > 1
        per_head = lowered_mask.bias.shape[1] > 1

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[b if per_row else 0, h if per_head else 0, i, j]

    use_compiled = q.is_cuda and not torch.compiler.is_compiling()
    kernel = _compiled_flex_attention() if use_compiled else _eager_flex_attention
    out: Tensor = kernel(
        q, k, v, score_mod, lowered_mask.block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _eager_flex_attention(*arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return flex_attention(*arguments, **options)
