"""Paged KV cache: keys and values of many sequences in fixed-size pages of one pool, with reference counts.

A sequence takes pages as it grows and releases all of them at the end. Its pages need not be adjacent, and
sequences may share pages (prefix caching); the page table of a request lists them. `PagedCacheView` presents
some rows of the pool as a Cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.kv_cache import KV

EMPTY_SLOT = -1  # the position of a slot that holds no token, and the number of a slot that is none
SlotIndex = tuple[Tensor, Tensor]  # page numbers, and offsets within the pages


class PagePool:
    """Pages of `page_size` slots, for every layer: keys and values (num_pages, kv_heads, page_size, D).

    Free pages are allocated from either end, the outermost first: pages of one use lie close together.
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
        """`count` pages, not cleared; MemoryError if fewer are free."""
        if count > self.num_free:
            raise MemoryError(
                f"{count} pages were asked for, and {self.num_free} of {self.num_pages} are free"
            )
        out: list[int] = []
        while len(out) < count:
            page = abs(self._free_heaps[from_end].pop())
            if not self.ref_counts[page]:  # it may have been allocated from the other end
                self.ref_counts[page] = 1
                out.append(page)
        self.num_free -= count
        return out

    def clear(self, pages: list[int]) -> None:
        """Mark all slots of these pages as empty."""
        self.positions[pages] = EMPTY_SLOT

    def reserve_scratch_page(self) -> int:
        """Take the last page out of the pool for good: padding rows write to it."""
        self.num_pages -= 1
        self.num_free -= 1
        self.ref_counts[self.num_pages] = 1
        return self.num_pages

    def retain(self, pages: list[int]) -> None:
        """Add a reference to these pages."""
        for page in pages:
            self.ref_counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a reference to these pages; those without any are free. ValueError for a page already free."""
        for page in pages:
            if self.ref_counts[page] < 1:
                raise ValueError(f"page {page} is free already: it was released twice")
            self.ref_counts[page] -= 1
            if not self.ref_counts[page]:
                self.num_free += 1
                self._free_heaps[0].push(page)
                self._free_heaps[1].push(-page)

    def pages_for(self, slots: int) -> int:
        """How many pages hold so many slots."""
        return -(-slots // self.page_size)

    def locate(self, slots: Tensor) -> SlotIndex:
        """Slot numbers → page numbers and offsets; EMPTY_SLOT becomes slot 0."""
        slots = slots.clamp(min=0)
        return slots // self.page_size, slots % self.page_size

    def write(self, layer: int, slot_index: SlotIndex, k: Tensor, v: Tensor) -> None:
        """Write keys and values, (N, kv_heads, D), to (N,) slots."""
        page, offset = slot_index
        for buffer, new in zip(self.layers[layer], (k, v), strict=True):
            buffer[page, :, offset] = new

    def gather(self, layer: int, slot_index: SlotIndex) -> KV:
        """(R, K) slots → keys and values (R, kv_heads, K, D)"""
        page, offset = slot_index
        k, v = (buffer[page, :, offset].transpose(1, 2) for buffer in self.layers[layer])
        return k, v


def _lazy_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros that on a CPU take no physical memory until written to, as those of PyTorch do at once."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    zero_bytes = torch.from_numpy(np.zeros(prod(shape) * like.element_size(), dtype=np.uint8))
    return zero_bytes.view(like.dtype).view(shape)


class _FreePageHeap:
    """The free pages ordered from one end of the pool: a heap without duplicates."""

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
    """Some rows of a pool as a Cache: (R, K) slots of past tokens, (R, n) slots for the new ones.

    EMPTY_SLOT pads both. `filled_indices` are the indices into the flattened new slots that are not padding;
    None: they are searched for.
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
            raise ValueError("pages hold sequences of any length: give the positions of the new tokens")
        past_filled = self.past_slots != EMPTY_SLOT
        new_segments = (self.new_slots != EMPTY_SLOT).long()
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
            "rows of a page pool are not reordered here: the page tables say which row sees which page"
        )


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
