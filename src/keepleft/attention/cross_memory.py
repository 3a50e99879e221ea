"""The cross-attention KV cache: every layer's keys and values of the source, computed once."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.kv_cache import KV


class Memory:
    """Each layer's keys and values of the source, (sources, H, S, D), and its (sources, S) segments.

    Neighbouring rows may share a source, as the beams of one sequence do: `rows_per_source` rows attend to
    each. Their queries are joined into one row of rows_per_source times as many queries, and reordering beams
    within a source moves nothing.
    """

    def __init__(self, layers: list[KV], segments: Tensor | None = None, rows_per_source: int = 1) -> None:
        self.layers = layers
        self.segments = segments
        self.rows_per_source = rows_per_source

    @property
    def rows(self) -> int:
        """Batch rows that attend to this memory."""
        return self.layers[0][0].shape[0] * self.rows_per_source

    def grid(self, queries: int, segments: Tensor | None = None) -> Grid:
        """`queries` per row over the source; a target segment sees the source segment of the same number."""
        if segments is not None and self.rows_per_source > 1:
            segments = segments.reshape(-1, self.rows_per_source * queries)
        return Grid(
            self.rows_per_source * queries, self.layers[0][0].shape[2], q_seg=segments, k_seg=self.segments
        )

    def reorder(self, rows: Tensor) -> None:
        """Reorder, drop or repeat batch rows. On a CPU, rows that still share a source go on sharing it."""
        sources = rows // self.rows_per_source
        self.rows_per_source = 1
        if rows.device.type == "cpu":  # on a GPU this would synchronise
            distinct_sources, counts = sources.unique_consecutive(return_counts=True)
            if bool((counts == counts[0]).all()):
                sources = distinct_sources
                self.rows_per_source = int(counts[0])
            if torch.equal(sources, torch.arange(len(self.layers[0][0]))):
                return
        self.layers = [(k.index_select(0, sources), v.index_select(0, sources)) for k, v in self.layers]
        self.segments = None if self.segments is None else self.segments[sources]

    def unshare(self) -> Memory:
        """The same memory with a source of its own for each row."""
        if self.rows_per_source == 1:
            return self
        repeat_rows = lambda t: t.repeat_interleave(self.rows_per_source, 0)
        return Memory(
            [(repeat_rows(k), repeat_rows(v)) for k, v in self.layers],
            None if self.segments is None else repeat_rows(self.segments),
        )
