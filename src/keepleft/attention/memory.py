"""What cross-attention looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.cache import Pair
from keepleft.attention.grid import Grid


class Memory:
    """Each layer's keys and values of the source, computed once.

    Neighbouring rows may share a source, as the beams of one text do: `share` rows look at each. Their queries are then
    asked as one row of so many more queries, and nothing moves when they change places among themselves.
    """

    def __init__(self, pairs: list[Pair], segments: Tensor | None = None, share: int = 1) -> None:
        self.pairs, self.segments, self.share = pairs, segments, share

    @property
    def rows(self) -> int:
        return self.pairs[0][0].shape[0] * self.share

    def grid(self, queries: int, segments: Tensor | None = None) -> Grid:
        """Queries over the source; each segment of the target sees the source segment of the same number."""
        if segments is not None and self.share > 1:
            segments = segments.reshape(-1, self.share * queries)
        return Grid(self.share * queries, self.pairs[0][0].shape[2], q_seg=segments, k_seg=self.segments)

    def keep(self, rows: Tensor) -> None:
        sources, self.share = rows // self.share, 1
        if rows.device.type == "cpu":  # a GPU would have to be waited for
            ones, counts = sources.unique_consecutive(return_counts=True)
            if bool((counts == counts[0]).all()):
                sources, self.share = ones, int(counts[0])
            if torch.equal(sources, torch.arange(len(self.pairs[0][0]))):
                return
        self.pairs = [(k.index_select(0, sources), v.index_select(0, sources)) for k, v in self.pairs]
        self.segments = None if self.segments is None else self.segments[sources]

    def apart(self) -> Memory:
        """The same with a source for each row."""
        if self.share == 1:
            return self
        spread = lambda t: t.repeat_interleave(self.share, 0)
        return Memory([(spread(k), spread(v)) for k, v in self.pairs], None if self.segments is None else spread(self.segments))
