"""Many texts of different lengths as one long array of integers, and the ways to lay them out as a rectangle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]


class Ragged(NamedTuple):
    flat: Whole     # all tokens, text after text
    lengths: Whole  # (n,)

    @property
    def begins(self) -> Whole:
        return np.cumsum(self.lengths) - self.lengths

    @classmethod
    def of(cls, texts: list[list[int]]) -> Ragged:
        flat = [token for text in texts for token in text]
        return cls(np.array(flat, np.int64), np.array([len(text) for text in texts], np.int64))

    def texts(self) -> list[list[int]]:
        return [part.tolist() for part in np.split(self.flat, np.cumsum(self.lengths)[:-1])] if len(self.lengths) else []


def spread(begins: Whole, lengths: Whole) -> Whole:
    """begin, begin + 1, … for each text, one after the other."""
    total = np.cumsum(lengths)
    return np.repeat(begins - (total - lengths), lengths) + np.arange(int(total[-1]) if len(total) else 0)


class Layout(NamedTuple):
    """Where each text goes in a rectangle: its row, its first column, and its number in the row, from 1 on."""

    row: Whole
    column: Whole
    segment: Whole
    shape: tuple[int, int]

    def lay(self, texts: Ragged, fill: int) -> Whole:
        out = np.full(self.shape, fill, np.int64)
        out[self._rows(texts), spread(self.column, texts.lengths)] = texts.flat
        return out

    def segments(self, texts: Ragged) -> Whole:
        """The number of its text for every token, 0 for padding."""
        out = np.zeros(self.shape, np.int64)
        out[self._rows(texts), spread(self.column, texts.lengths)] = np.repeat(self.segment, texts.lengths)
        return out

    def _rows(self, texts: Ragged) -> Whole:
        return np.repeat(self.row, texts.lengths)


def padded(texts: Ragged, *, width: int | None = None, rows: int | None = None) -> Layout:
    """A row for each text. Rows beyond the texts, where more are asked for, are all padding."""
    n = len(texts.lengths)
    shape = (rows or n, width or int(texts.lengths.max(initial=1)))
    return Layout(np.arange(n), np.zeros(n, np.int64), np.ones(n, np.int64), shape)


def packed(rows: list[Whole], texts: Ragged, *, width: int, height: int) -> Layout:
    """Texts one behind the other: `rows` says which make up each row, and they come in that order."""
    sizes = np.array([len(row) for row in rows], np.int64)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)  # the text that begins each one's row
    column = texts.begins - texts.begins[first] if len(first) else texts.begins
    ends = column + texts.lengths
    if int(ends.max(initial=0)) > width:
        raise ValueError(f"texts of {int(ends.max())} tokens do not fit into a row of {width}")
    return Layout(np.repeat(np.arange(len(rows)), sizes), column, np.arange(len(first)) - first + 1, (height, width))
