"""What one request has in a pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Leaf:
    """All its texts write into the same pages: beams share what they have in common."""

    width: int = 1                                     # texts
    pages: list[int] = field(default_factory=list)
    used: int = 0                                      # slots
    length: int = 0                                    # tokens of each text
    source: list[int] = field(default_factory=list)    # pages
    heard: int = 0                                     # tokens of the source
    seats: list[int] = field(default_factory=list)     # rows of the tables, where there are tables

    def slots(self, size: int, begin: int, count: int) -> list[int]:
        """The numbers of some of its slots in the pool."""
        return [self.pages[n // size] * size + n % size for n in range(begin, begin + count)]

    def span(self, size: int, begin: int, count: int) -> np.ndarray:
        """The same for many of them."""
        return _numbers(self.pages, size)[begin:begin + count]

    def source_span(self, size: int, count: int) -> np.ndarray:
        return _numbers(self.source, size)[:count]


def next_places(leaves: Sequence[Leaf], size: int) -> tuple[list[int], list[int]]:
    """Of each text of these leaves: the slot of its next token, and how many tokens there are before it."""
    return ([slot for leaf in leaves for slot in leaf.slots(size, leaf.used, leaf.width)],
            [leaf.length for leaf in leaves for _ in range(leaf.width)])


def _numbers(pages: list[int], size: int) -> np.ndarray:
    """Of all slots of some pages, one after the other."""
    return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()
