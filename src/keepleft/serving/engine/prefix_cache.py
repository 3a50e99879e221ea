"""Pages that hold the beginning of a text, kept for the next text of the same tenant that begins alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from keepleft.attention.paged_kv_cache import PagePool

PageKey = tuple[str, int, tuple[int, ...]]  # the tenant, the page before it, its tokens


class PrefixCache:
    """Whole pages only.

    A page is known by what stands in it and in all before it; two tenants never share one.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        # page and its number; the least used first
        self.entries: OrderedDict[PageKey, tuple[int, int]] = OrderedDict()
        self.ids = count(1)
        self.hits = 0

    def match(self, tenant: str, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning, held for whoever asked."""
        pages, parent_id = [], 0
        for chunk in self._page_chunks(tokens):
            entry = self.entries.get((tenant, parent_id, chunk))
            if entry is None:
                break
            self.entries.move_to_end((tenant, parent_id, chunk))
            page, parent_id = entry
            pages.append(page)
        self.pool.retain(pages)
        self.hits += len(pages)
        return pages

    def insert(self, tenant: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remember the pages that tokens fill."""
        parent_id = 0
        for chunk, page in zip(self._page_chunks(tokens), pages, strict=False):
            page_key = (tenant, parent_id, chunk)
            if page_key not in self.entries:
                self.entries[page_key] = page, next(self.ids)
                self.pool.retain([page])
            parent_id = self.entries[page_key][1]

    def evict(self, num_pages: int) -> None:
        """Let go of pages that nobody looks at, until so many are free or none is left."""
        for page_key, (page, _) in list(self.entries.items()):
            if self.pool.num_free >= num_pages:
                return
            if self.pool.ref_counts[page] == 1:
                del self.entries[page_key]
                self.pool.release([page])

    @property
    def unused_pages(self) -> int:
        """Pages that are only kept in case."""
        return sum(self.pool.ref_counts[page] == 1 for page, _ in self.entries.values())

    def clear(self) -> None:
        for page, _ in self.entries.values():
            self.pool.release([page])
        self.entries.clear()

    def _page_chunks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        page_size = self.pool.page_size
        return [tuple(tokens[n : n + page_size]) for n in range(0, len(tokens) - page_size + 1, page_size)]
