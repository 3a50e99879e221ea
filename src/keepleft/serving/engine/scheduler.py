"""Scheduler of the continuous-batching engine: which requests run, and which of them each model call serves.

Pure policy, no model calls. Tenants take fair turns, and requests are admitted while rows and KV pages last.
Prompts are prefilled within a token budget per step (chunked prefill). Where pages run out, unused pages of
the prefix cache are evicted first; then the newest request is preempted, and its pages are recomputed later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from keepleft.attention.paged_kv_cache import PagePool, PageTable
from keepleft.serving.engine.fair_queue import FairQueue
from keepleft.serving.engine.prefix_cache import PrefixCache
from keepleft.serving.engine.request import RequestHandle
from keepleft.serving.engine.sequence import SequenceGroup


class PageAllocator(Protocol):
    """Page bookkeeping of a `PagedRunner`, all that the scheduler needs of it."""

    @property
    def pool(self) -> PagePool: ...
    @property
    def source_pool(self) -> PagePool | None: ...
    def reserve(self, page_table: PageTable, num_slots: int) -> bool: ...
    def reserve_source(self, page_table: PageTable, num_tokens: int) -> bool: ...
    def attach_prefix(self, page_table: PageTable, pages: list[int]) -> None: ...
    def free(self, page_table: PageTable) -> None: ...


class Scheduler:
    """At most `max_num_seqs` sequences run at once; a step prefills at most `prefill_chunk_size` tokens.

    A request stays a `RequestHandle` until its turn comes; then `make_group` turns it into a `SequenceGroup`.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        make_group: Callable[[RequestHandle], SequenceGroup],
        *,
        max_num_seqs: int,
        prefill_chunk_size: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.allocator = allocator
        self.make_group = make_group
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.prefix_cache = PrefixCache(allocator.pool) if enable_prefix_caching else None
        self.waiting: FairQueue[SequenceGroup | RequestHandle] = FairQueue()
        self.running: dict[SequenceGroup, None] = {}  # an ordered set, by admission
        self.num_admitted = 0
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def num_running_rows(self) -> int:
        return sum(group.num_rows for group in self.running)

    def check_fits(self, num_rows: int, num_slots: int, num_source_tokens: int) -> None:
        """Raise ValueError for a request that would not fit even if it ran alone."""
        if num_rows > self.max_num_seqs:
            raise ValueError(
                f"{num_rows} sequences were asked for, and {self.max_num_seqs} is the most at once: "
                "ask for fewer"
            )
        pool, source_pool = self.allocator.pool, self.allocator.source_pool
        if pool.pages_for(num_slots) > pool.num_pages or (
            source_pool is not None and source_pool.pages_for(num_source_tokens) > source_pool.num_pages
        ):
            raise ValueError(
                f"the request could need room for {num_slots + num_source_tokens} tokens, and there is "
                f"memory for {pool.num_pages * pool.page_size}: shorten it, or ask for fewer max_new_tokens"
            )

    # -- admission

    def submit(self, handle: RequestHandle) -> None:
        self.waiting.push(handle.request.tenant, handle)

    def admit(self) -> list[tuple[RequestHandle, Exception]]:
        """Move waiting requests into the batch; return those whose options turn out to be unusable."""
        failures: list[tuple[RequestHandle, Exception]] = []
        num_rows = self.num_running_rows
        while (item := self.waiting.peek()) is not None:
            if isinstance(item, RequestHandle):
                try:
                    group = self.make_group(item)
                except Exception as error:  # such as a grammar that does not compile
                    self.waiting.pop()
                    failures.append((item, error))
                    continue
            else:
                group = item
            if num_rows + group.num_rows > self.max_num_seqs or not self._allocate(group):
                if isinstance(item, RequestHandle):  # wait as a group, so that it is built only once
                    self.waiting.pop()
                    self.waiting.push(group.request.tenant, group, front=True)
                break
            self.waiting.pop()
            self.num_admitted += 1
            group.admission_order = self.num_admitted
            group.handle.started_at = group.handle.started_at or time.monotonic()
            num_rows += group.num_rows
            self.running[group] = None
            num_source_tokens = len(group.request.tokens) if group.is_encoder_decoder else 0
            self.waiting.charge(group.request.tenant, len(group.pending_prompt) + num_source_tokens)
        return failures

    def remove_cancelled(self) -> list[SequenceGroup | RequestHandle]:
        """Remove cancelled requests, waiting and running, and free their pages."""
        waiting = [item for item in self.waiting.items() if handle_of(item).cancelled]
        self.waiting.remove(set(waiting))
        running = [group for group in self.running if group.handle.cancelled]
        for group in running:
            self.release(group)
        return [*waiting, *running]

    def release(self, group: SequenceGroup) -> None:
        """Take a request out of the batch and free its pages."""
        del self.running[group]
        self.allocator.free(group.page_table)

    def clear(self) -> None:
        """Drop all requests."""
        for group in list(self.running):
            self.release(group)
        self.waiting = FairQueue()

    def charge(self, batch: Iterable[SequenceGroup]) -> None:
        """Charge each tenant for the tokens generated in one step."""
        self.waiting.charge_all((group.request.tenant, group.num_rows) for group in batch)

    # -- what to run

    def schedule_encode(self) -> list[SequenceGroup]:
        """Requests whose source to encode now, shortest first so that little is padding."""
        pending = [group for group in self.running if group.needs_encoding]
        pending.sort(key=lambda group: len(group.request.tokens))
        return self._fit_chunk(pending, lambda group: len(group.request.tokens))

    def schedule_prefill(self) -> list[SequenceGroup]:
        """Requests of whose prompt to prefill one chunk now."""
        pending = [group for group in self.running if group.pending_prompt and not group.needs_encoding]
        return self._fit_chunk(pending, lambda group: len(group.pending_prompt))

    def cache_prefixes(self, batch: Iterable[SequenceGroup]) -> None:
        """Put the pages of prompts that are now complete into the prefix cache."""
        if self.prefix_cache is None:
            return
        for group in batch:
            if not group.pending_prompt and group in self.running:
                self.prefix_cache.insert(
                    group.request.tenant, group.prompt_tokens[:-1], group.page_table.pages
                )

    def schedule_decode(self) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """Requests to decode one token for, and those preempted to make room for it.

        Each of the former has a slot for the token; requests with equally many rows stand side by side.
        """
        ready = [group for group in self.running if not group.pending_prompt and not group.needs_encoding]
        preempted: dict[SequenceGroup, None] = {}
        for group in ready:
            num_slots = group.page_table.num_slots + group.num_rows
            if num_slots <= len(group.page_table.pages) * self.allocator.pool.page_size:
                continue
            while group not in preempted and not self._reserve(group.page_table, num_slots):
                preempted[self._preempt_newest()] = None
        fitting = [group for group in ready if group not in preempted]
        return sorted(fitting, key=lambda group: group.num_rows), list(preempted)

    def _preempt_newest(self) -> SequenceGroup:
        """Send the newest request back to the head of the queue; its pages are free.

        Requests of several sequences are never preempted: they hold all the pages that they can need.
        """
        candidates = (group for group in self.running if group.num_rows == 1)
        victim = max(candidates, key=lambda group: group.admission_order)
        self.release(victim)
        victim.preempt()
        self.waiting.push(victim.request.tenant, victim, front=True)
        self.preemptions += 1
        return victim

    # -- pages and budget

    def _allocate(self, group: SequenceGroup) -> bool:
        """Reserve pages for the prompt.

        Several sequences get all that they may ever need, as they cannot be preempted.
        """
        page_table = group.page_table
        if self.prefix_cache is not None:
            cached_pages = self.prefix_cache.match(group.request.tenant, group.prompt_tokens[:-1])
            self.allocator.attach_prefix(page_table, cached_pages)
        num_slots = group.max_slots if group.num_rows > 1 else len(group.prompt_tokens)
        if self._reserve(page_table, num_slots) and (
            self.allocator.source_pool is None
            or self.allocator.reserve_source(page_table, len(group.request.tokens))
        ):
            return True
        self.allocator.free(page_table)
        return False

    def _reserve(self, page_table: PageTable, num_slots: int) -> bool:
        """Reserve pages for `num_slots` slots, evicting from the prefix cache where the pool is short."""
        if self.allocator.reserve(page_table, num_slots):
            return True
        if self.prefix_cache is None:
            return False
        self.prefix_cache.evict(self.allocator.pool.pages_for(num_slots) - len(page_table.pages))
        return self.allocator.reserve(page_table, num_slots)

    def _fit_chunk(
        self, candidates: list[SequenceGroup], length: Callable[[SequenceGroup], int]
    ) -> list[SequenceGroup]:
        """As many as fit into `prefill_chunk_size` tokens, padding included; at least one."""
        batch: list[SequenceGroup] = []
        max_length = 0
        for group in candidates:
            max_length = max(max_length, length(group))
            if batch and max_length * (len(batch) + 1) > self.prefill_chunk_size:
                break
            batch.append(group)
        return batch


def split_deterministic(batch: list[SequenceGroup]) -> list[list[SequenceGroup]]:
    """Put each request that must be deterministic into a batch of its own.

    Its logits are then the same bit for bit, whatever else is being served.
    """
    batchable = [group for group in batch if not group.request.options.deterministic]
    alone = [[group] for group in batch if group.request.options.deterministic]
    return [batchable, *alone] if batchable else alone


def handle_of(item: SequenceGroup | RequestHandle) -> RequestHandle:
    return item if isinstance(item, RequestHandle) else item.handle
