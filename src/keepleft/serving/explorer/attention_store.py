"""Stored queries and keys of every layer, from which attention maps are recomputed strip by strip.

A text of 2,000 tokens has 12 × 12 maps of 16 MB each in a small model; its queries and keys take a hundredth
of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.attention.attend import Sight, Watcher
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, full
from keepleft.models.design import Design
from keepleft.models.transformer import Model
from keepleft.models.watch import attach_watchers, attention_modules
from keepleft.nn.position import RelativePositionBias

STRIP_HEIGHT = 128  # rows of a strip: few enough for its scores to stay in the CPU's cache


class RowStrip(NamedTuple):
    """Some rows of a map, over the columns that any of them attends to."""

    begin: int  # its first row, counted among the requested ones
    end: int
    left: int  # its first column
    right: int
    weights: Tensor  # (heads, rows, columns)


@dataclass(frozen=True)
class StoredAttention:
    """One attention of one layer, over one text."""

    q: Tensor  # (H, Q, D)
    k: Tensor  # (H or a divisor of it, K, D)
    scale: float
    mask: Mask  # that was applied
    claim: Mask  # that the design claims
    grid: Grid
    relative_bias: RelativePositionBias | None  # T5's bias on the scores

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def columns(self) -> int:
        return self.k.shape[1]

    def strips(
        self, heads: Sequence[int], rows: Tensor | None = None, height: int = STRIP_HEIGHT
    ) -> Iterator[RowStrip]:
        """Attention weights of some heads, strip by strip; of all rows, or of the given ones."""
        device = self.q.device
        head_index = torch.tensor(list(heads), device=device)
        rows = torch.arange(self.rows, device=device) if rows is None else rows.to(device)
        q = _at_least_float32(self.q[head_index]) * self.scale
        k = _at_least_float32(self.k[head_index // (self.heads // self.k.shape[0])])
        bias = (
            None
            if self.relative_bias is None
            else self._bias_by_distance(self.relative_bias)[head_index].to(q.dtype)
        )
        for begin in range(0, len(rows), height):
            row_index = rows[begin : begin + height]
            visible = self.table(self.mask, row_index, head_index)
            left, right = visible_columns(visible.any(0).any(0))
            visible = visible[..., left:right]
            scores = torch.matmul(q[:, row_index], k[:, left:right].mT)
            if bias is not None:
                scores += bias.unfold(1, right - left, 1)[:, self.rows - 1 - row_index + left]
            hidden = ~visible
            if bool(hidden.any()):  # only in some columns: left of a causal diagonal all is visible
                first, last = visible_columns(hidden.any(0).any(0))
                scores[..., first:last].masked_fill_(hidden[..., first:last], float("-inf"))
            weights = scores.softmax(-1)
            if bool((fully_masked := hidden.all(-1, keepdim=True)).any()):
                weights = weights.masked_fill(fully_masked, 0.0)
            yield RowStrip(begin, begin + len(row_index), left, right, weights)

    def _bias_by_distance(self, relative_bias: RelativePositionBias) -> Tensor:
        """(H, Q - 1 + K) bias at each distance, farthest left first; each row of a map is a slice of it."""
        if not self.grid.is_plain or self.grid.start:
            raise ValueError(
                "the relative bias is computed for one text at positions 0, 1, 2, …: leave segments out"
            )
        distances = torch.arange(1 - self.rows, self.columns, device=self.q.device)
        return relative_bias(torch.zeros_like(distances[None, :1]), distances[None])[0, :, 0]

    def weights(self, heads: Sequence[int], rows: Tensor) -> Tensor:
        """(heads, rows, K) attention weights of a few rows."""
        out = _at_least_float32(self.q).new_zeros(len(heads), len(rows), self.columns)
        for strip in self.strips(heads, rows):
            out[:, strip.begin : strip.end, strip.left : strip.right] = strip.weights
        return out

    def table(self, mask: Mask, rows: Tensor, heads: Tensor) -> Tensor:
        """(heads or 1, rows, K): what a mask lets these rows attend to."""
        return self.grid.table(
            mask, batch=1, heads=self.heads, device=self.q.device, head_indices=heads, queries=rows
        )[0]

    def claimed_table(self, heads: Sequence[int], rows: Tensor) -> Tensor:
        """(rows, K): what the design lets any of these heads attend to."""
        return self.table(
            self.claim, rows.to(self.q.device), torch.tensor(list(heads), device=self.q.device)
        ).any(0)


def claimed_mask(design: Design, name: str) -> Mask:
    """The mask that a design claims for an attention, named as in "decoder.3.self"."""
    side, layer_index, kind = name.split(".")
    masks = getattr(design, side).mask
    return full if kind == "cross" else masks[int(layer_index) % len(masks)]  # type: ignore[no-any-return]


def store_attentions(model: Model, forward: Callable[[], Any]) -> dict[str, StoredAttention]:
    """Run a forward pass over one text and store each of its attentions, named as in "decoder.3.cross"."""
    stored: dict[str, StoredAttention] = {}

    def watcher(name: str) -> Watcher:
        side, _, kind = name.split(".")
        claim = claimed_mask(model.design, name)
        relative_bias = None if kind == "cross" else relative_biases.get(side)

        def store(q: Tensor, k: Tensor, sight: Sight, scale: float) -> None:
            stored[name] = StoredAttention(
                _clone(q[0]), _clone(k[0]), scale, sight.mask, claim, sight.grid, relative_bias
            )

        return store

    relative_biases = {  # copies, as the model may be training
        side: deepcopy(bias_module)
        for side in ("encoder", "decoder")
        if (bias_module := getattr(getattr(model, side, None), "nearness", None)) is not None
    }
    with attach_watchers(attention_modules(model), watcher):
        forward()
    return stored


def _clone(x: Tensor) -> Tensor:
    """A copy: a view would keep the projection that holds the values alive too."""
    return x.clone(memory_format=torch.contiguous_format)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def visible_columns(visible: Tensor) -> tuple[int, int]:
    """First visible column, and one past the last; (0, 1) where none is visible."""
    indices = visible.nonzero()
    return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 1)
