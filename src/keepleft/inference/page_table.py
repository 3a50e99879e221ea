"""The page table of one request: which pages of the pool hold its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class PageTable:
    """All beams of a request write into the same pages and share what they have in common."""

    width: int = 1  # sequences (beams)
    pages: list[int] = field(default_factory=list)
    num_slots: int = 0  # slots in use
    num_tokens: int = 0  # tokens of each sequence
    source_pages: list[int] = field(default_factory=list)
    num_source_tokens: int = 0
    rows: list[int] = field(default_factory=list)  # rows of the slot table (GPU only)

    def slots(self, page_size: int, begin: int, count: int) -> list[int]:
        """Indices in the pool of `count` of its slots, from slot `begin` on."""
        return [self.pages[n // page_size] * page_size + n % page_size for n in range(begin, begin + count)]

    def slot_range(self, page_size: int, begin: int, count: int) -> np.ndarray:
        """The same as an array."""
        return _page_slots(self.pages, page_size)[begin : begin + count]

    def source_slot_range(self, page_size: int, count: int) -> np.ndarray:
        return _page_slots(self.source_pages, page_size)[:count]


def next_slots(page_tables: Sequence[PageTable], page_size: int) -> tuple[list[int], list[int]]:
    """For each sequence of these requests: the slot of its next token, and the number of tokens before it."""
    return (
        [
            slot
            for page_table in page_tables
            for slot in page_table.slots(page_size, page_table.num_slots, page_table.width)
        ],
        [page_table.num_tokens for page_table in page_tables for _ in range(page_table.width)],
    )


def _page_slots(pages: list[int], page_size: int) -> np.ndarray:
    """Indices of all slots of these pages, in order."""
    return (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)).ravel()
