"""The definition of attention: slow, exact, and what every other backend is tested against.

The mask is lowered to a boolean table and a bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask


class ReferenceMask(NamedTuple):
    table: Tensor  # (B or 1, H or 1, Q, K) booleans
    bias: Tensor | None = None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> ReferenceMask:
    return ReferenceMask(grid.table(mask, batch=batch, heads=heads, device=device))


def add_bias(lowered_mask: ReferenceMask, bias: Tensor) -> ReferenceMask:
    return lowered_mask._replace(bias=bias if lowered_mask.bias is None else lowered_mask.bias + bias)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lowered_mask: ReferenceMask, scale: float, dropout: float
) -> Tensor:
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return F.dropout(attention_weights(q, k, lowered_mask.table, lowered_mask.bias, scale), dropout) @ v


def attention_weights(q: Tensor, k: Tensor, table: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Softmax over the visible keys, (B, H, Q, K); all zeros for a query that sees none."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias
    # softmax over no key is 0 / 0: those rows are zeroed, forward and backward
    empty_queries = ~table.any(-1, keepdim=True)
    return scores.masked_fill(~table, float("-inf")).softmax(-1).masked_fill(empty_queries, 0.0)
