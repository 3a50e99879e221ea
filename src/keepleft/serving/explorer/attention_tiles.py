"""Parts of one attention map: all of it at low resolution, a tile of it, one row or column of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.serving.explorer import wire
from keepleft.serving.explorer.attention_store import STRIP_HEIGHT, StoredAttention
from keepleft.serving.explorer.params import Params
from keepleft.serving.explorer.rollout import Rollout
from keepleft.serving.explorer.text_cache import ReadText

MAX_OVERVIEW_CELLS = 512  # along one side
MAX_TILE_CELLS = 256  # along one side


class AttentionMap:
    """One head of one layer, the mean of its heads, or the attention rollout up to it."""

    def __init__(self, read_text: ReadText, params: Params) -> None:
        self.read_text = read_text
        self.name = params.choice("name", list(read_text.attentions))
        layers = read_text.attentions[self.name]
        self.layer_index = params.integer("layer", 0, len(layers) - 1)
        self.layer: StoredAttention = layers[self.layer_index]
        self.head = params.integer_or_choice(
            "head", self.layer.heads, ("mean", "rollout") if self.name.endswith("self") else ("mean",)
        )

    @property
    def heads(self) -> Sequence[int]:
        return [self.head] if isinstance(self.head, int) else range(self.layer.heads)

    def strips(self, height: int = STRIP_HEIGHT) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, weights) of all rows, from top to bottom.

        The weights are (end - begin, columns) up to the last visible column; what is missing is zero.
        """
        if self.head == "rollout":
            for n, part in enumerate(self._rollout().weights.split(height)):
                yield n * height, n * height + len(part), part
            return
        for strip in self.layer.strips(self.heads, height=height):
            weights = strip.weights[0] if len(self.heads) == 1 else strip.weights.mean(0)
            yield strip.begin, strip.end, F.pad(weights, (strip.left, 0)) if strip.left else weights

    def row_weights(self, rows: Tensor) -> Tensor:
        """(rows, K) attention weights."""
        if self.head == "rollout":
            return self._rollout().weights[rows]
        return self.layer.weights(self.heads, rows).mean(0)

    def claimed_table(self, rows: Tensor) -> Tensor:
        """(rows, K): what the design lets these rows attend to."""
        if self.head == "rollout":
            return self._rollout().claim[rows]
        return self.layer.claimed_table(self.heads, rows)

    def _rollout(self) -> Rollout:
        return self.read_text.compute_rollout(self.name, self.layer_index)


def overview(read_text: ReadText, params: Params) -> dict[str, Any]:
    """The map in at most `size` cells along each side; a cell is a maximum over weights."""
    attention_map = AttentionMap(read_text, params)
    size = params.integer("size", 1, MAX_OVERVIEW_CELLS)
    rows, columns = attention_map.layer.rows, attention_map.layer.columns
    cell_size = -(-max(rows, columns) // size)
    num_cells = (-(-rows // cell_size), -(-columns // cell_size))
    cells = torch.zeros(num_cells)
    claim = torch.zeros(num_cells, dtype=torch.bool)
    for begin, end, weights in attention_map.strips(max(1, STRIP_HEIGHT // cell_size) * cell_size):
        cell_slice = slice(begin // cell_size, -(-end // cell_size))
        part = _max_pool(weights, cell_size).float().cpu()
        cells[cell_slice, : part.shape[1]] = part
        claim[cell_slice] = _max_pool(attention_map.claimed_table(torch.arange(begin, end)), cell_size).cpu()
    max_weight = float(cells.max())
    return {
        "rows": rows,
        "columns": columns,
        "cell_size": cell_size,
        "map_u8": wire.sqrt_u8(cells, max_weight),
        "max_weight": max_weight,
        "claim_bits": wire.bits(claim),
    }


def tile(read_text: ReadText, params: Params) -> dict[str, Any]:
    """A square of the map, at most `size` along each side, from (row, column) on."""
    attention_map = AttentionMap(read_text, params)
    size = params.integer("size", 1, MAX_TILE_CELLS)
    row = params.integer("row", 0, attention_map.layer.rows - 1)
    column = params.integer("column", 0, attention_map.layer.columns - 1)
    rows = torch.arange(row, min(row + size, attention_map.layer.rows))
    columns = slice(column, column + size)
    weights = attention_map.row_weights(rows)[:, columns]
    return {
        "row": row,
        "column": column,
        "rows": weights.shape[0],
        "columns": weights.shape[1],
        "map_u8": wire.sqrt_u8(weights),
        "claim_bits": wire.bits(attention_map.claimed_table(rows)[:, columns]),
    }


def token_row(read_text: ReadText, params: Params) -> dict[str, Any]:
    """What a token attends to, or with `incoming`, which tokens attend to it."""
    attention_map = AttentionMap(read_text, params)
    if not params.flag("incoming", False):
        token = params.integer("token", 0, attention_map.layer.rows - 1)
        return {"weights_f32": wire.f32(attention_map.row_weights(torch.tensor([token]))[0])}
    token = params.integer("token", 0, attention_map.layer.columns - 1)
    zero = torch.zeros(1, device=attention_map.layer.q.device)
    incoming = [
        weights[:, token] if token < weights.shape[1] else zero.expand(end - begin)
        for begin, end, weights in attention_map.strips()
    ]
    return {"weights_f32": wire.f32(torch.cat(incoming))}


def _max_pool(table: Tensor, size: int) -> Tensor:
    """The maximum of each size × size square; squares at the edges may be smaller."""
    if size == 1:
        return table
    rows, columns = table.shape
    padded = F.pad(table, (0, -columns % size, 0, -rows % size))
    row_max = padded.view(-1, size, padded.shape[1]).amax(1)  # over rows first: they are contiguous
    return row_max.unflatten(1, (-1, size)).amax(2)
