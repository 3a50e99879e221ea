"""Pieces of one attention map: the whole of it coarsely, a tile of it, one row or column of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.serving.explorer import wire
from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.kept import TALL, Layer
from keepleft.serving.explorer.reading import Read
from keepleft.serving.explorer.rollout import Rollout

OVERVIEW, TILE = 512, 256  # cells along one side, at most


class Map:
    """One head of one layer, the mean of its heads, or all layers up to it multiplied through."""

    def __init__(self, read: Read, given: Given) -> None:
        self.read, self.name = read, given.word("name", list(read.attentions))
        layers = read.attentions[self.name]
        self.number = given.whole("layer", 0, len(layers) - 1)
        self.layer: Layer = layers[self.number]
        self.head = given.or_word("head", self.layer.heads, ("mean", "rollout") if self.name.endswith("self") else ("mean",))

    @property
    def heads(self) -> Sequence[int]:
        return [self.head] if isinstance(self.head, int) else range(self.layer.heads)

    def strips(self, tall: int = TALL) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, weights (rows, to the last column seen)), from top to bottom; what is missing on the right is zero."""
        if self.head == "rollout":
            yield from ((n, min(n + tall, self.layer.rows), part) for n, part in
                        zip(range(0, self.layer.rows, tall), self._rolled().weights.split(tall), strict=True))
            return
        for strip in self.layer.strips(self.heads, tall=tall):
            weights = strip.weights[0] if len(self.heads) == 1 else strip.weights.mean(0)
            yield strip.begin, strip.end, torch.nn.functional.pad(weights, (strip.left, 0)) if strip.left else weights

    def some(self, rows: Tensor) -> Tensor:
        """(rows, K)"""
        return self._rolled().weights[rows] if self.head == "rollout" else self.layer.weights(self.heads, rows).mean(0)

    def claimed(self, rows: Tensor) -> Tensor:
        """(rows, K): what the design allows."""
        if self.head == "rollout":
            return self._rolled().claim[rows]
        return self.layer.claimed(self.heads, rows)

    def _rolled(self) -> Rollout:
        return self.read.rolled(self.name, self.number)


def overview(read: Read, given: Given) -> dict[str, Any]:
    found, size = Map(read, given), given.whole("size", 1, OVERVIEW)
    rows, columns = found.layer.rows, found.layer.columns
    step = -(-max(rows, columns) // size)
    down, across = -(-rows // step), -(-columns // step)
    cells, claim = torch.zeros(down, across), torch.zeros(down, across, dtype=torch.bool)
    for begin, end, weights in found.strips(max(1, TALL // step) * step):
        here = slice(begin // step, -(-end // step))
        part = _cells(weights, step).float().cpu()
        cells[here, :part.shape[1]] = part
        claim[here] = _cells(found.claimed(torch.arange(begin, end)), step).cpu()
    top = float(cells.max())
    return {"rows": rows, "columns": columns, "step": step, "map_u8": wire.shades(cells, top), "top": top,
            "claim_bits": wire.bits(claim)}


def tile(read: Read, given: Given) -> dict[str, Any]:
    found, size = Map(read, given), given.whole("size", 1, TILE)
    row = given.whole("row", 0, found.layer.rows - 1)
    column = given.whole("column", 0, found.layer.columns - 1)
    rows, columns = torch.arange(row, min(row + size, found.layer.rows)), slice(column, column + size)
    weights = found.some(rows)[:, columns]
    return {"row": row, "column": column, "rows": weights.shape[0], "columns": weights.shape[1],
            "map_u8": wire.shades(weights), "claim_bits": wire.bits(found.claimed(rows)[:, columns])}


def reads(read: Read, given: Given) -> dict[str, Any]:
    """What a token reads, or who reads it."""
    found, by = Map(read, given), given.flag("by", False)
    if not by:
        return {"weights_f32": wire.f32(found.some(torch.tensor([given.whole("token", 0, found.layer.rows - 1)]))[0])}
    token = given.whole("token", 0, found.layer.columns - 1)
    zero = torch.zeros(1, device=found.layer.q.device)
    return {"weights_f32": wire.f32(torch.cat([weights[:, token] if token < weights.shape[1] else zero.expand(end - begin)
                                               for begin, end, weights in found.strips()]))}


def _cells(table: Tensor, step: int) -> Tensor:
    """The largest of each square of step × step; at the edges there may be less of it."""
    if step == 1:
        return table
    rows, columns = table.shape
    more = torch.nn.functional.pad(table, (0, -columns % step, 0, -rows % step))
    return more.view(-1, step, more.shape[1]).amax(1).unflatten(1, (-1, step)).amax(2)  # along rows first: they lie together
