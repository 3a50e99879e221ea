"""Sequence packing: several sequences in a row of fixed width, by best fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keepleft.data.batch import Batch, collate
from keepleft.data.objectives import Objective
from keepleft.data.ragged import IntArray, pack_layout
from keepleft.data.token_store import TokenStore

MAX_OPEN_ROWS = 64  # rows filled at the same time


@dataclass(frozen=True)
class PackedLayout:
    """Sequences packed into rows of one width, each a segment of its own: none attends to another."""

    width: int

    def plan(
        self, order: IntArray, sizes: tuple[IntArray, ...], budget: int, rng: np.random.Generator
    ) -> Iterator[list[IntArray]]:
        batch_rows: list[IntArray] = []
        height = max(1, budget // self.width)
        for row in _best_fit_packing(
            order.tolist(), np.stack([size[order] for size in sizes], 1).tolist(), self.width
        ):
            batch_rows.append(np.array(row))
            if len(batch_rows) == height:
                yield batch_rows
                batch_rows = []
        if batch_rows:
            yield batch_rows

    def make_batch(
        self,
        store: TokenStore,
        objective: Objective,
        rows: list[IntArray],
        budget: int,
        rng: np.random.Generator,
        identity: str,
    ) -> Batch:
        examples = objective.examples(
            tuple(store[field].take(np.concatenate(rows)) for field in objective.fields), rng
        )
        height = max(1, budget // self.width)
        layouts = [
            pack_layout(rows, sequence, width=self.width, height=height)
            for sequence in (examples.tokens, examples.source)
            if sequence is not None
        ]
        return collate(examples, layouts[0], layouts[1] if len(layouts) > 1 else None, identity)


def _best_fit_packing(records: list[int], sizes: list[list[int]], width: int) -> Iterator[list[int]]:
    """Rows of records, best fit: each record goes into the fullest open row that has room for it.

    `sizes` holds each record's sizes, as target and as source; both must fit. Where MAX_OPEN_ROWS rows are
    open, the fullest is closed.
    """
    # open rows with the space left in each dimension, by the smaller space
    open_rows: dict[int, list[tuple[list[int], list[int]]]] = {}
    space_bits = 0  # bit n is set where there is an open row with space n
    num_open = 0

    def close_row(space: int) -> list[int]:
        nonlocal space_bits, num_open
        row, _ = open_rows[space].pop()
        num_open -= 1
        if not open_rows[space]:
            space_bits &= ~(1 << space)
        return row

    for record, record_sizes in zip(records, sizes, strict=True):
        fitting = space_bits >> (required := max(record_sizes))
        if fitting:
            space = required + (fitting & -fitting).bit_length() - 1
            remaining = open_rows[space][-1][1]
            row = close_row(space)
        else:
            if num_open == MAX_OPEN_ROWS:
                yield close_row((space_bits & -space_bits).bit_length() - 1)
            row, remaining = [], [width] * len(record_sizes)
        row.append(record)
        remaining = [space - size for size, space in zip(record_sizes, remaining, strict=True)]
        space = min(remaining)
        open_rows.setdefault(space, []).append((row, remaining))
        space_bits |= 1 << space
        num_open += 1
    while space_bits:
        yield close_row((space_bits & -space_bits).bit_length() - 1)
