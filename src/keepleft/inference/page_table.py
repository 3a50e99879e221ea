"""What one request has in a pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class PageTable:
    """All its texts write into the same pages: beams share what they have in common."""

    width: int = 1                                     # texts
    pages: list[int] = field(default_factory=list)
    num_slots: int = 0                                      # slots
    num_tokens: int = 0                                    # tokens of each text
    source_pages: list[int] = field(default_factory=list)    # pages
    num_source_tokens: int = 0                                     # tokens of the source
    rows: list[int] = field(default_factory=list)     # rows of the tables, where there are tables

    def slots(self, page_size: int, begin: int, count: int) -> list[int]:
        """The numbers of some of its slots in the pool."""
        return [self.pages[n // page_size] * page_size + n % page_size for n in range(begin, begin + count)]

    def slot_range(self, page_size: int, begin: int, count: int) -> np.ndarray:
        """The same for many of them."""
        return _page_slots(self.pages, page_size)[begin:begin + count]

    def source_slot_range(self, page_size: int, count: int) -> np.ndarray:
        return _page_slots(self.source_pages, page_size)[:count]


def next_slots(page_tables: Sequence[PageTable], page_size: int) -> tuple[list[int], list[int]]:
    """Of each text of these leaves: the slot of its next token, and how many tokens there are before it."""
    return ([slot for page_table in page_tables for slot in page_table.slots(page_size, page_table.num_slots, page_table.width)],
            [page_table.num_tokens for page_table in page_tables for _ in range(page_table.width)])


def _page_slots(pages: list[int], page_size: int) -> np.ndarray:
    """Of all slots of some pages, one after the other."""
    return (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)).ravel()
