"""Keys and values of many texts in pages of one pool: who needs room takes a page, who leaves gives all of
them back at once.

A text's slots need not lie side by side, and texts may share pages. `Leaves` is the view of some rows: a
cache like any other.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import prod

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.kv_cache import KV

EMPTY_SLOT = -1  # where a slot holds nothing
SlotIndex = tuple[Tensor, Tensor]  # pages, and places in them


class PagePool:
    """`pages` of `size` slots each, for every layer: (pages, Hk, size, D) keys and values.

    Free pages are handed out from either end, the outermost first, so that pages of one kind lie close
    together.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, like: Tensor
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, kv_heads, page_size, head_dim)
        self.layers: list[KV] = [
            (_lazy_zeros(shape, like), _lazy_zeros(shape, like)) for _ in range(num_layers)
        ]
        # the position of the token in each slot
        self.positions = torch.full((num_pages, page_size), EMPTY_SLOT, device=like.device)
        self.ref_counts = [0] * num_pages
        self._free_heaps = [_FreePageHeap(range(num_pages)), _FreePageHeap(range(0, -num_pages, -1))]
        self.num_free = num_pages

    def allocate(self, count: int, *, from_end: bool = False) -> list[int]:
        """So many pages, with whatever was in them; there must be as many."""
        if count > self.num_free:
            raise MemoryError(
                f"{count} pages were asked for, and {self.num_free} of {self.num_pages} are free"
            )
        out: list[int] = []
        while len(out) < count:
            page = abs(self._free_heaps[from_end].pop())
            if not self.ref_counts[page]:  # it may have left by the other end
                self.ref_counts[page] = 1
                out.append(page)
        self.num_free -= count
        return out

    def clear(self, pages: list[int]) -> None:
        """Nothing is in these any more."""
        self.positions[pages] = EMPTY_SLOT

    def reserve_scratch_page(self) -> int:
        """The last page, which is nobody's from now on."""
        self.num_pages -= 1
        self.num_free -= 1
        self.ref_counts[self.num_pages] = 1
        return self.num_pages

    def retain(self, pages: list[int]) -> None:
        """One more text looks at these."""
        for page in pages:
            self.ref_counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """One text fewer looks at these; where it was the last, they are free."""
        for page in pages:
            if self.ref_counts[page] < 1:
                raise ValueError(f"page {page} is free already: it was given back twice")
            self.ref_counts[page] -= 1
            if not self.ref_counts[page]:
                self.num_free += 1
                self._free_heaps[0].push(page)
                self._free_heaps[1].push(-page)

    def pages_for(self, slots: int) -> int:
        """Pages for so many slots."""
        return -(-slots // self.page_size)

    def locate(self, slots: Tensor) -> SlotIndex:
        """Slots by page and place in it; those that are none, anywhere."""
        slots = slots.clamp(min=0)
        return slots // self.page_size, slots % self.page_size

    def write(self, layer: int, slot_index: SlotIndex, k: Tensor, v: Tensor) -> None:
        """(N,) slots, (N, Hk, D) keys and values"""
        page, offset = slot_index
        for buffer, new in zip(self.layers[layer], (k, v), strict=True):
            buffer[page, :, offset] = new

    def gather(self, layer: int, slot_index: SlotIndex) -> KV:
        """(R, K) slots → keys and values (R, Hk, K, D)"""
        page, offset = slot_index
        k, v = (buffer[page, :, offset].transpose(1, 2) for buffer in self.layers[layer])
        return k, v


def _lazy_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """On a CPU memory that is not there before it is written to: PyTorch's own zeros are written at once."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return (
        torch.from_numpy(np.zeros(prod(shape) * like.element_size(), dtype=np.uint8))
        .view(like.dtype)
        .view(shape)
    )


class _FreePageHeap:
    """The free pages as seen from one end: a heap that holds none twice."""

    def __init__(self, keys: range) -> None:
        self.heap = sorted(keys)
        self.members = set(keys)

    def pop(self) -> int:
        key = heappop(self.heap)
        self.members.discard(key)
        return key

    def push(self, key: int) -> None:
        if key not in self.members:
            self.members.add(key)
            heappush(self.heap, key)


class PagedCacheView:
    """Some rows of a pool as a cache: (R, K) slots that hold what came before, (R, n) slots for what comes.

    -1: none.

    `filled` are the places of the new slots that are some, counted through all rows; None: they are looked
    for.
    """

    def __init__(
        self, pool: PagePool, past_slots: Tensor, new_slots: Tensor, filled_indices: Tensor | None = None
    ) -> None:
        self.pool = pool
        self.past_slots = past_slots
        self.new_slots = new_slots
        self.rows = len(new_slots)
        self.filled_indices = (
            (new_slots != EMPTY_SLOT).flatten().nonzero()[:, 0] if filled_indices is None else filled_indices
        )
        self.all_filled = len(self.filled_indices) == new_slots.numel()
        write_slots = new_slots.flatten() if self.all_filled else new_slots.flatten()[self.filled_indices]
        self.write_slots = write_slots
        self.write_index = pool.locate(write_slots)
        self.past_index = pool.locate(past_slots)

    def admit(self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None) -> Grid:
        if positions is None:
            raise ValueError("pages hold texts of any length: give the positions of the new tokens")
        past_filled, new_segments = self.past_slots != EMPTY_SLOT, (self.new_slots != EMPTY_SLOT).long()
        flat_positions = self.pool.positions.flatten()
        flat_positions[self.write_slots] = (
            positions.flatten() if self.all_filled else positions.flatten()[self.filled_indices]
        )
        if not self.past_slots.shape[1]:
            if self.all_filled:
                return Grid(queries, queries, 0, positions, positions)
            return Grid(queries, queries, 0, positions, positions, new_segments, new_segments)
        past_positions = torch.where(past_filled, flat_positions[self.past_slots.clamp(min=0)], 0)
        return Grid(
            queries,
            self.past_slots.shape[1] + queries,
            0,
            positions,
            torch.cat([past_positions, positions], 1),
            new_segments,
            torch.cat([past_filled.long(), new_segments], 1),
        )

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        new_kv = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (k, v)]
        if not self.all_filled:
            new_kv = [tensor[self.filled_indices] for tensor in new_kv]
        self.pool.write(layer, self.write_index, new_kv[0], new_kv[1])
        if not self.past_slots.shape[1]:
            return k, v
        past_k, past_v = self.pool.gather(layer, self.past_index)
        return torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)

    def reorder(self, rows: Tensor) -> None:
        raise ValueError(
            "rows of pages are not moved about: whoever holds the pages says which row sees which"
        )
