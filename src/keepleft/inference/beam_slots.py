"""Which KV slots each beam of a request may attend to, where all beams write into the same pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.paged_kv_cache import PagePool, PageTable


class BeamSlots:
    """One table (pages, width, page_size) for each number of beams.

    A request of one sequence sees all of its pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tables: dict[int, Tensor] = {}

    def table(self, width: int) -> Tensor:
        if width not in self.tables:
            pool = self.pool
            self.tables[width] = torch.zeros(
                pool.num_pages, width, pool.page_size, dtype=torch.bool, device=pool.positions.device
            )
        return self.tables[width]

    def clear_pages(self, pool: PagePool, page_table: PageTable, pages: list[int]) -> None:
        """New pages of a request: nothing is visible in them yet."""
        pool.clear(pages)
        if pool is self.pool and page_table.width > 1:
            self.table(page_table.width)[pages] = False

    def mark_shared(self, page_tables: Sequence[PageTable], slots: Sequence[np.ndarray]) -> None:
        """All beams of a request see these slots."""
        for page_table, shared_slots in zip(page_tables, slots, strict=True):
            if page_table.width > 1 and len(shared_slots):
                visible = self.table(page_table.width)
                slot_indices = torch.from_numpy(shared_slots).to(visible.device)
                visible[slot_indices // self.pool.page_size, :, slot_indices % self.pool.page_size] = True

    def mark_own(self, page_tables: Sequence[PageTable], slots: Tensor) -> None:
        """(R,) one slot per row, which that beam alone sees."""
        first_row = 0
        for page_table in page_tables:
            if page_table.width > 1:
                own_slots = slots[first_row : first_row + page_table.width]
                beams = torch.arange(page_table.width, device=slots.device)
                self.table(page_table.width)[
                    own_slots // self.pool.page_size, beams, own_slots % self.pool.page_size
                ] = True
            first_row += page_table.width

    def reorder(self, page_tables: Sequence[PageTable], parents: Tensor) -> None:
        """Each beam continues its parent: it sees what the parent saw."""
        for page_table, beam_parents in zip(page_tables, parents, strict=True):
            visible = self.table(page_table.width)
            visible[page_table.pages] = visible[page_table.pages][:, beam_parents]

    def mark_source(self, page_tables: Sequence[PageTable], slots: Sequence[np.ndarray]) -> None:
        """All beams see the whole source: nothing to record."""

    def release(self, page_table: PageTable) -> None:
        """Nothing to do: whoever allocates the pages next clears them."""
