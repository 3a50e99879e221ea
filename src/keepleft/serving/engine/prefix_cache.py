"""Prefix cache: KV pages of prompts, kept for the next prompt of the same tenant that starts alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from keepleft.attention.paged_kv_cache import PagePool
from keepleft.serving.engine.request import Tenant

PageKey = tuple[Tenant, int, tuple[int, ...]]  # tenant, id of the page before it (0: none), its tokens


class PrefixCache:
    """Caches full pages only. A page is keyed by its tokens and all before them; tenants never share one."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        # page and its id, least recently used first; ids are not reused, as pages are
        self.entries: OrderedDict[PageKey, tuple[int, int]] = OrderedDict()
        self.ids = count(1)
        self.queries = 0  # full pages of prompts that were admitted
        self.hits = 0  # those of them that were cached

    def match(self, tenant: Tenant, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix, retained for the caller."""
        pages = []
        parent_id = 0
        for chunk in self._page_chunks(tokens):
            page_key = (tenant, parent_id, chunk)
            entry = self.entries.get(page_key)
            if entry is None:
                break
            self.entries.move_to_end(page_key)
            page, parent_id = entry
            pages.append(page)
        self.pool.retain(pages)
        return pages

    def count_hits(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Count the pages found for a prompt: once, though it may be looked up often until there is room."""
        self.queries += len(tokens) // self.pool.page_size
        self.hits += len(pages)

    def insert(self, tenant: Tenant, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Cache the pages that these tokens fill."""
        parent_id = 0
        for chunk, page in zip(self._page_chunks(tokens), pages, strict=False):
            page_key = (tenant, parent_id, chunk)
            if page_key not in self.entries:
                self.entries[page_key] = page, next(self.ids)
                self.pool.retain([page])
            parent_id = self.entries[page_key][1]

    def evict(self, num_pages: int) -> None:
        """Evict pages that no request uses, until `num_pages` are free or none is left to evict."""
        for page_key, (page, _) in list(self.entries.items()):
            if self.pool.num_free >= num_pages:
                return
            if self.pool.ref_counts[page] == 1:
                del self.entries[page_key]
                self.pool.release([page])

    @property
    def unused_pages(self) -> int:
        """Pages that the cache alone holds."""
        return sum(self.pool.ref_counts[page] == 1 for page, _ in self.entries.values())

    def clear(self) -> None:
        for page, _ in self.entries.values():
            self.pool.release([page])
        self.entries.clear()

    def _page_chunks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        page_size = self.pool.page_size
        return [tuple(tokens[n : n + page_size]) for n in range(0, len(tokens) - page_size + 1, page_size)]
