"""The definition in operations that torch.export and ONNX can trace, with no size made constant."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.backends.reference import ReferenceMask, add_bias
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask

__all__ = ["add_bias", "attend", "lower"]


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> ReferenceMask:
    """A table (B or 1, H or 1, Q, K), made without reading a size: a graph traced at one length fits any."""
    q = _positions(grid.queries, grid.start, grid.q_pos, grid.q_seg, device)[:, None, :, None]
    k = _positions(grid.keys, 0, grid.k_pos, grid.k_seg, device)[:, None, None, :]
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    # q + k >= 0 is always true: it broadcasts the mask over all queries and keys
    visible = mask.predicate(device)(b, h, q, k) & (q + k >= 0)
    if grid.k_seg is not None:
        visible = visible & (grid.k_seg != 0)[:, None, None, :]
        if grid.q_seg is not None:
            visible = visible & (grid.q_seg[:, None, :, None] == grid.k_seg[:, None, None, :])
    elif grid.q_seg is not None:
        visible = visible & (grid.q_seg != 0)[:, None, :, None]
    return ReferenceMask(visible)


def _positions(
    count: int, start: int, positions: Tensor | None, segments: Tensor | None, device: torch.device
) -> Tensor:
    """(B or 1, count); counted along the segments if there are any, as tracing may make `count` constant."""
    if positions is not None:
        return positions
    ones = (
        torch.ones(1, count, dtype=torch.long, device=device)
        if segments is None
        else torch.ones_like(segments)
    )
    return ones.cumsum(1) - 1 + start


def attend(
    q: Tensor, k: Tensor, v: Tensor, lowered_mask: ReferenceMask, scale: float, dropout: float
) -> Tensor:
    """Shapes as in attend(). Grouped-query heads get an axis: (B, H, Q, D) is (B, Hk, H / Hk, Q, D)."""
    if dropout:
        raise ValueError(
            f"an exported graph has no dropout ({dropout} was asked for): call model.eval() first"
        )
    kv_heads = k.shape[1]
    q = q.unflatten(1, (kv_heads, -1))
    scores = q @ k.transpose(2, 3)[:, :, None] * scale
    scores = scores.flatten(1, 2)
    if lowered_mask.bias is not None:
        scores = scores + lowered_mask.bias
    visible = lowered_mask.table
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return (weights.unflatten(1, (kv_heads, -1)) @ v[:, :, None]).flatten(1, 2)
