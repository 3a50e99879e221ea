"""A step over pages on a GPU: tables say in which slot each token of a text lies, and steps are recorded and played again.

A text has a seat as long as it is served, and the tables of its seat say what it sees; beams change places by exchanging
tables. Recordings are made for a few numbers of rows; a step takes the next larger one, and rows to spare write to a page of
their own that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.pages import Pool
from keepleft.models.leaf import Leaf, next_places
from keepleft.models.lean import Lean
from keepleft.nn.swift_paged import Seated, SwiftPaged

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # numbers of rows that are recorded


class Tabled:
    """For models that can take steady steps: at most `rows` texts of at most `longest` tokens."""

    def __init__(self, model: Any, pool: Pool, sources: Pool | None, rows: int, longest: int, *, record: bool = True) -> None:
        self.lean, self.pool, self.sources = Lean(model, SwiftPaged()), pool, sources
        self.device, self.record = model.token.weight.device, record
        self.waste = pool.set_aside()  # where rows to spare write to
        whole = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=self.device)
        self.table = whole(rows + 1, longest + 1)
        self.source_table = whole(rows + 1, longest + 1) if sources is not None else None
        self.source_length = whole(rows + 1)
        self.free = list(range(rows))[::-1]
        self.spare = rows                       # the seat of rows to spare
        self.given = torch.zeros(4, max(rows, 1), dtype=torch.long, device=self.device)  # token, seat, length, slot of a row
        self.lean.ready(longest + 1)
        self.played: dict[int, tuple[Any, Tensor]] = {}

    def blank(self, pool: Pool, leaf: Leaf, pages: list[int]) -> None:
        pass

    def shown(self, leaves: Sequence[Leaf], slots: Sequence[np.ndarray]) -> None:
        """The next tokens of all their texts lie in these."""
        self._written(self.table, leaves, slots, [leaf.length for leaf in leaves])

    def heard(self, leaves: Sequence[Leaf], slots: Sequence[np.ndarray]) -> None:
        """Their sources lie in these."""
        assert self.source_table is not None
        self._written(self.source_table, leaves, slots, [0] * len(leaves))
        each = [(seat, len(some)) for leaf, some in zip(leaves, slots, strict=True) for seat in leaf.seats]
        seats, lengths = torch.tensor(each, device=self.device).t()
        self.source_length[seats] = lengths.to(torch.int32)

    def _written(self, table: Tensor, leaves: Sequence[Leaf], slots: Sequence[np.ndarray], begins: Sequence[int]) -> None:
        for leaf in leaves:
            self._seat(leaf)
        each = [np.stack([np.full_like(some, seat), begin + np.arange(len(some)), some])
                for leaf, some, begin in zip(leaves, slots, begins, strict=True) for seat in leaf.seats]
        seats, columns, values = torch.from_numpy(np.concatenate(each, 1)).to(self.device)
        table[seats, columns] = values.to(torch.int32)

    def _seat(self, leaf: Leaf) -> None:
        if not leaf.seats:
            leaf.seats = [self.free.pop() for _ in range(leaf.width)]

    def left(self, leaf: Leaf) -> None:
        self.free += leaf.seats
        leaf.seats = []

    def moved(self, leaves: Sequence[Leaf], parents: Tensor) -> None:
        seats = torch.tensor([leaf.seats for leaf in leaves], device=self.device)
        farthest = max(leaf.length for leaf in leaves)
        self.table[seats.flatten(), :farthest] = self.table[seats.gather(1, parents).flatten(), :farthest]

    def step(self, leaves: Sequence[Leaf], tokens: Sequence[int]) -> Tensor:
        size, rows = self.pool.size, len(tokens)
        for leaf in leaves:
            self._seat(leaf)
        wide = min(next((many for many in SIZES if many >= rows), rows), self.given.shape[1])
        more = wide - rows
        slots, lengths = next_places(leaves, size)
        given = [[*tokens, *[0] * more], [*(seat for leaf in leaves for seat in leaf.seats), *[self.spare] * more],
                 [*lengths, *[0] * more], [*slots, *(self.waste * size + n % size for n in range(more))]]
        self.given[:, :wide] = torch.tensor(given, device=self.device)
        return self._play(wide)[:rows]

    def warm(self) -> None:
        """Record all numbers of rows now, so that nobody waits for it later: rows to spare write where nobody looks."""
        many = self.given.shape[1]
        idle = torch.tensor([0, self.spare, 0, self.waste * self.pool.size], device=self.device)
        self.given.copy_(idle[:, None].expand(-1, many))
        with torch.no_grad():
            for rows in sorted({min(size, many) for size in SIZES}):
                self._play(rows)

    def _play(self, rows: int) -> Tensor:
        if not self.record:
            return self._run(rows)
        if rows not in self.played:
            self.played[rows] = self._recorded(rows)
        graph, scores = self.played[rows]
        graph.replay()
        return scores

    def _recorded(self, rows: int) -> tuple[Any, Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled before anything is recorded; the same step twice changes nothing
                self._run(rows)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scores = self._run(rows)
        return graph, scores

    def _run(self, rows: int) -> Tensor:
        tokens, seat, length, slot = self.given[:, :rows]
        self.table[seat, length] = slot.to(torch.int32)
        at = lambda table: F.embedding(length, table)
        near = self.lean.near if len(self.lean.near) else None
        here = Seated(self.table, seat, length, slot, self.lean.turn(at), near)
        if self.sources is None:
            return self.lean.run(tokens, at, here, self.pool.pairs)
        assert self.source_table is not None
        across = Seated(self.source_table, seat, self.source_length, slot)
        return self.lean.run(tokens, at, here, self.pool.pairs, self.sources.pairs, across)
