"""Keys and values of many texts in pages of one pool: who needs room takes a page, who leaves gives all of them back at once.

A text's slots need not lie side by side, and texts may share pages. `Leaves` is the view of some rows: a cache like any other.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import prod

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.cache import Pair
from keepleft.attention.grid import Grid

EMPTY = -1  # where a slot holds nothing
Where = tuple[Tensor, Tensor]  # pages, and places in them


class Pool:
    """`pages` of `size` slots each, for every layer: (pages, Hk, size, D) keys and values.

    Free pages are handed out from either end, the outermost first, so that pages of one kind lie close together.
    """

    def __init__(self, layers: int, pages: int, size: int, heads: int, width: int, like: Tensor) -> None:
        self.pages, self.size = pages, size
        shape = (pages, heads, size, width)
        self.pairs: list[Pair] = [(_zeros(shape, like), _zeros(shape, like)) for _ in range(layers)]
        self.place = torch.full((pages, size), EMPTY, device=like.device)  # the position of the token in each slot
        self.holders = [0] * pages
        self._ends = [_End(range(pages)), _End(range(0, -pages, -1))]
        self.free = pages

    def take(self, count: int, *, high: bool = False) -> list[int]:
        """So many pages, with whatever was in them; there must be as many."""
        if count > self.free:
            raise MemoryError(f"{count} pages were asked for, and {self.free} of {self.pages} are free")
        out: list[int] = []
        while len(out) < count:
            page = abs(self._ends[high].pop())
            if not self.holders[page]:  # it may have left by the other end
                self.holders[page] = 1
                out.append(page)
        self.free -= count
        return out

    def clear(self, pages: list[int]) -> None:
        """Nothing is in these any more."""
        self.place[pages] = EMPTY

    def set_aside(self) -> int:
        """The last page, which is nobody's from now on."""
        self.pages -= 1
        self.free -= 1
        self.holders[self.pages] = 1
        return self.pages

    def hold(self, pages: list[int]) -> None:
        """One more text looks at these."""
        for page in pages:
            self.holders[page] += 1

    def give(self, pages: list[int]) -> None:
        """One text fewer looks at these; where it was the last, they are free."""
        for page in pages:
            if self.holders[page] < 1:
                raise ValueError(f"page {page} is free already: it was given back twice")
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free += 1
                self._ends[0].push(page)
                self._ends[1].push(-page)

    def needed(self, slots: int) -> int:
        """Pages for so many slots."""
        return -(-slots // self.size)

    def where(self, slots: Tensor) -> Where:
        """Slots by page and place in it; those that are none, anywhere."""
        slots = slots.clamp(min=0)
        return slots // self.size, slots % self.size

    def put(self, layer: int, where: Where, k: Tensor, v: Tensor) -> None:
        """(N,) slots, (N, Hk, D) keys and values"""
        page, within = where
        for buffer, new in zip(self.pairs[layer], (k, v), strict=True):
            buffer[page, :, within] = new

    def at(self, layer: int, where: Where) -> Pair:
        """(R, K) slots → keys and values (R, Hk, K, D)"""
        page, within = where
        k, v = (buffer[page, :, within].transpose(1, 2) for buffer in self.pairs[layer])
        return k, v


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """On a CPU memory that is not there before it is written to: PyTorch's own zeros are written at once."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(prod(shape) * like.element_size(), dtype=np.uint8)).view(like.dtype).view(shape)


class _End:
    """The free pages as seen from one end: a heap that holds none twice."""

    def __init__(self, numbers: range) -> None:
        self.heap, self.known = sorted(numbers), set(numbers)

    def pop(self) -> int:
        number = heappop(self.heap)
        self.known.discard(number)
        return number

    def push(self, number: int) -> None:
        if number not in self.known:
            self.known.add(number)
            heappush(self.heap, number)


class Leaves:
    """Some rows of a pool as a cache: (R, K) slots that hold what came before, (R, n) slots for what comes. -1: none.

    `filled` are the places of the new slots that are some, counted through all rows; None: they are looked for.
    """

    def __init__(self, pool: Pool, before: Tensor, new: Tensor, filled: Tensor | None = None) -> None:
        self.pool, self.before, self.new = pool, before, new
        self.rows = len(new)
        self.filled = (new != EMPTY).flatten().nonzero()[:, 0] if filled is None else filled
        self.whole = len(self.filled) == new.numel()
        slots = new.flatten() if self.whole else new.flatten()[self.filled]
        self.slots, self.home, self.past = slots, pool.where(slots), pool.where(before)

    def admit(self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None) -> Grid:
        if positions is None:
            raise ValueError("pages hold texts of any length: give the positions of the new tokens")
        there, real = self.before != EMPTY, (self.new != EMPTY).long()
        flat = self.pool.place.flatten()
        flat[self.slots] = positions.flatten() if self.whole else positions.flatten()[self.filled]
        if not self.before.shape[1]:
            if self.whole:
                return Grid(queries, queries, 0, positions, positions)
            return Grid(queries, queries, 0, positions, positions, real, real)
        old = torch.where(there, flat[self.before.clamp(min=0)], 0)
        return Grid(queries, self.before.shape[1] + queries, 0, positions, torch.cat([old, positions], 1), real,
                    torch.cat([there.long(), real], 1))

    def put(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        new = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (k, v)]
        if not self.whole:
            new = [tensor[self.filled] for tensor in new]
        self.pool.put(layer, self.home, new[0], new[1])
        if not self.before.shape[1]:
            return k, v
        old_k, old_v = self.pool.at(layer, self.past)
        return torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)

    def keep(self, rows: Tensor) -> None:
        raise ValueError("rows of pages are not moved about: whoever holds the pages says which row sees which")
