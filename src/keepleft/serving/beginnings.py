"""Pages that hold the beginning of a text, kept for the next text of the same tenant that begins alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from keepleft.attention.pages import Pool

Key = tuple[str, int, tuple[int, ...]]  # the tenant, the page before it, its tokens


class Beginnings:
    """Whole pages only. A page is known by what stands in it and in all before it; two tenants never share one."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.known: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # page and its number; the least used first
        self.numbers = count(1)
        self.hits = 0

    def find(self, tenant: str, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning, held for whoever asked."""
        out, before = [], 0
        for key in self._keys(tokens):
            found = self.known.get((tenant, before, key))
            if found is None:
                break
            self.known.move_to_end((tenant, before, key))
            page, before = found
            out.append(page)
        self.pool.hold(out)
        self.hits += len(out)
        return out

    def keep(self, tenant: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remember the pages that tokens fill."""
        before = 0
        for key, page in zip(self._keys(tokens), pages, strict=False):
            name = (tenant, before, key)
            if name not in self.known:
                self.known[name] = page, next(self.numbers)
                self.pool.hold([page])
            before = self.known[name][1]

    def spare(self, count: int) -> None:
        """Let go of pages that nobody looks at, until so many are free or none is left."""
        for name, (page, _) in list(self.known.items()):
            if self.pool.free >= count:
                return
            if self.pool.holders[page] == 1:
                del self.known[name]
                self.pool.give([page])

    @property
    def idle(self) -> int:
        """Pages that are only kept in case."""
        return sum(self.pool.holders[page] == 1 for page, _ in self.known.values())

    def forget(self) -> None:
        for page, _ in self.known.values():
            self.pool.give([page])
        self.known.clear()

    def _keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.pool.size
        return [tuple(tokens[n:n + size]) for n in range(0, len(tokens) - size + 1, size)]
