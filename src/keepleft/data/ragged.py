"""Token sequences of different lengths as one flat array, and layouts of them in a rectangle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Ragged(NamedTuple):
    flat: IntArray  # the tokens of all sequences, one after the other
    lengths: IntArray  # (n,)

    @property
    def starts(self) -> IntArray:
        return np.cumsum(self.lengths) - self.lengths

    @classmethod
    def from_lists(cls, sequences: list[list[int]]) -> Ragged:
        flat = [token for sequence in sequences for token in sequence]
        return cls(np.array(flat, np.int64), np.array([len(sequence) for sequence in sequences], np.int64))

    def to_lists(self) -> list[list[int]]:
        if not len(self.lengths):
            return []
        return [sequence.tolist() for sequence in np.split(self.flat, np.cumsum(self.lengths)[:-1])]


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """start, start + 1, … for each sequence, concatenated."""
    total = np.cumsum(lengths)
    return np.repeat(starts - (total - lengths), lengths) + np.arange(int(total[-1]) if len(total) else 0)


class Layout(NamedTuple):
    """Where each sequence goes in a rectangle: row, first column, and segment number in the row, from 1."""

    row: IntArray
    column: IntArray
    segment: IntArray
    shape: tuple[int, int]

    def scatter(self, sequences: Ragged, fill: int) -> IntArray:
        """The rectangle, with `fill` where there is no token."""
        out = np.full(self.shape, fill, np.int64)
        out[self._row_indices(sequences), ranges(self.column, sequences.lengths)] = sequences.flat
        return out

    def segments(self, sequences: Ragged) -> IntArray:
        """The segment number of every token, 0 for padding."""
        out = np.zeros(self.shape, np.int64)
        out[self._row_indices(sequences), ranges(self.column, sequences.lengths)] = np.repeat(
            self.segment, sequences.lengths
        )
        return out

    def _row_indices(self, sequences: Ragged) -> IntArray:
        return np.repeat(self.row, sequences.lengths)


def pad_layout(sequences: Ragged, *, width: int | None = None, rows: int | None = None) -> Layout:
    """One row for each sequence; where more rows are requested, the rest are padding."""
    n = len(sequences.lengths)
    shape = (rows or n, width or int(sequences.lengths.max(initial=1)))
    return Layout(np.arange(n), np.zeros(n, np.int64), np.ones(n, np.int64), shape)


def pack_layout(rows: list[IntArray], sequences: Ragged, *, width: int, height: int) -> Layout:
    """Sequences packed into rows. `rows` holds the records of each row; sequences come in that order."""
    sizes = np.array([len(row) for row in rows], np.int64)
    row_first = np.repeat(np.cumsum(sizes) - sizes, sizes)  # the first sequence of each one's row
    column = sequences.starts - sequences.starts[row_first] if len(row_first) else sequences.starts
    ends = column + sequences.lengths
    if int(ends.max(initial=0)) > width:
        raise ValueError(f"texts of {int(ends.max())} tokens do not fit into a row of {width}")
    return Layout(
        np.repeat(np.arange(len(rows)), sizes),
        column,
        np.arange(len(row_first)) - row_first + 1,
        (height, width),
    )
