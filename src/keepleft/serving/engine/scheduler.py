"""Scheduler of the continuous-batching engine: which requests run, and which of them each model call serves.

Pure policy, no model calls. Keys share the engine by weight, users share what their key gets (fair_queue.py).
Requests are admitted while rows and KV pages last. If the rows are taken, a key that has less than its share
gets some from one that has more: their requests are paused, keep their pages, and go on later. Prompts are
prefilled within a budget of tokens and time per step (chunked prefill), so that nobody's stream stands
still. Where pages run out, unused pages of the prefix cache are evicted first; then the newest request of the
key that was served most is preempted, and its pages are recomputed later.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from keepleft.attention.paged_kv_cache import PagePool, PageTable
from keepleft.serving.engine.fair_queue import BURST, FairQueue
from keepleft.serving.engine.prefix_cache import PrefixCache
from keepleft.serving.engine.request import RequestHandle, Tenant
from keepleft.serving.engine.scheduled_request import ScheduledRequest
from keepleft.serving.engine.shares import Shares
from keepleft.serving.engine.step_timer import StepTimer

AnyRequest = TypeVar("AnyRequest", bound=ScheduledRequest)
PREFILL_SHARE = 1.0  # seconds of prefill for each second of the decode step that it delays
HEAVY_SHARE = 1.0  # seconds of decoding for heavy keys for each second of a light one
MIN_SLICE_SECONDS = 0.02  # of prefill beside decode steps that are shorter
MIN_CHUNK_SIZE = 8  # tokens of prompts that a step prefills in any case
DETERMINISTIC_CHUNK_SIZE = 128  # of prompts whose chunks must not depend on anything else
RESERVED_FRACTION = 1 / 8  # of the pages, kept from requests whose pages cannot be taken back
LIGHT_LAG = BURST / 2  # a key that was served so much less than another goes before it


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
    """At most `max_num_seqs` sequences run at once, and as many again may be paused with their pages.

    A request stays a `RequestHandle` until its turn comes; then `make_scheduled` turns it into a
    `ScheduledRequest`. `weights`: the shares of API keys, 1 if not given. `slices_by_time`: prefill beside
    decode steps is bounded by the time that it takes; False where a chunk takes little time anyway.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        make_scheduled: Callable[[RequestHandle], ScheduledRequest],
        *,
        max_num_seqs: int,
        prefill_chunk_size: int,
        enable_prefix_caching: bool = True,
        weights: Mapping[str, float] | None = None,
        slices_by_time: bool = True,
    ) -> None:
        self.allocator = allocator
        self.make_scheduled = make_scheduled
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.weights = weights
        self.slices_by_time = slices_by_time
        self.prefix_cache = PrefixCache(allocator.pool) if enable_prefix_caching else None
        self.timer = StepTimer()
        self.waiting: FairQueue[ScheduledRequest | RequestHandle] = FairQueue(weights)
        self.paused: dict[ScheduledRequest, None] = {}  # those of the waiting that hold pages
        self.running: dict[ScheduledRequest, None] = {}  # an ordered set, by admission
        self.pending: dict[ScheduledRequest, None] = {}  # those of them that are not read to their end
        self.rows_by_tenant: Counter[Tenant] = Counter()  # of the running
        self.newly_started: set[ScheduledRequest] = set()  # in this call of `admit`
        self.decodes_in_turns = False  # in this step not everybody decodes
        self.newly_paused: list[ScheduledRequest] = []
        self.num_admitted = 0
        self.num_steps = 0
        self.preemptions = 0
        self.spare_seconds = 0.0  # of decode steps for heavy keys, saved up while light ones run

    @property
    def busy(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def num_running_rows(self) -> int:
        return self.rows_by_tenant.total()

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
        self.newly_started.clear()
        while (item := self.waiting.peek()) is not None:
            if isinstance(item, RequestHandle):
                try:
                    scheduled = self.make_scheduled(item)
                except Exception as error:  # such as a grammar that does not compile
                    self.waiting.pop()
                    failures.append((item, error))
                    continue
                self.waiting.pop()  # from now on it waits as a scheduled request, which is built only once
                self.waiting.push(scheduled.tenant, scheduled, front=True)
            else:
                scheduled = item
            if not self._make_room(scheduled):
                if not self.running and self.paused:  # they hold the pages that it needs
                    self._start(next(iter(self.paused)))
                break
            self._start(scheduled)
        return failures

    def _start(self, scheduled: ScheduledRequest) -> None:
        resumed = scheduled in self.paused
        self.paused.pop(scheduled, None)
        if resumed:
            self.waiting.remove({scheduled})
        else:
            self.waiting.take(scheduled.tenant)
        self.num_admitted += 1
        scheduled.admission_order = self.num_admitted
        handle = scheduled.handle
        handle.started_at = handle.started_at or time.monotonic()
        self.running[scheduled] = None
        self.newly_started.add(scheduled)
        self.rows_by_tenant[scheduled.tenant] += scheduled.num_rows
        self.pending[scheduled] = None
        if not resumed and not scheduled.num_preemptions:  # nobody pays for what is computed again
            self.waiting.charge(scheduled.tenant, scheduled.num_pending + len(scheduled.source))

    def remove_cancelled(self) -> list[ScheduledRequest | RequestHandle]:
        """Remove cancelled requests, waiting and running, and free their pages."""
        waiting = [item for item in self.waiting.items() if handle_of(item).cancelled]
        self.waiting.remove(set(waiting))
        for item in waiting:
            if isinstance(item, ScheduledRequest):
                self._free_waiting(item)
        running = [scheduled for scheduled in self.running if scheduled.handle.cancelled]
        for scheduled in running:
            self.release(scheduled)
        return [*waiting, *running]

    def release(self, scheduled: ScheduledRequest) -> None:
        """Take a request out of the batch and free its pages."""
        self._leave_batch(scheduled)
        self.allocator.free(scheduled.page_table)

    def _leave_batch(self, scheduled: ScheduledRequest) -> None:
        del self.running[scheduled]
        self.pending.pop(scheduled, None)
        self.rows_by_tenant[scheduled.tenant] -= scheduled.num_rows
        if not self.rows_by_tenant[scheduled.tenant]:
            del self.rows_by_tenant[scheduled.tenant]

    def settle(self) -> list[ScheduledRequest]:
        """The requests that are now read to their end: they decode, or have finished."""
        ready = [scheduled for scheduled in self.pending if scheduled.is_ready]
        for scheduled in ready:
            del self.pending[scheduled]
        return ready

    def clear(self) -> None:
        """Drop all requests."""
        for scheduled in list(self.running):
            self.release(scheduled)
        for scheduled in list(self.paused):
            self._free_waiting(scheduled)
        self.waiting = FairQueue(self.weights)

    def charge(self, batch: Iterable[ScheduledRequest]) -> dict[Tenant, int]:
        """Charge each tenant for the tokens generated in one step, and return how many they were.

        Logits processors and beams are charged by their time: as the rows that the model decodes meanwhile.
        """
        rows_by_tenant: dict[Tenant, int] = {}
        strategy_seconds: dict[Tenant, float] = {}
        for scheduled in batch:
            tenant = scheduled.tenant
            rows_by_tenant[tenant] = rows_by_tenant.get(tenant, 0) + scheduled.num_rows
            if scheduled.strategy_seconds:
                strategy_seconds[tenant] = strategy_seconds.get(tenant, 0.0) + scheduled.strategy_seconds
        num_rows = sum(rows_by_tenant.values())
        for tenant, num_tokens in rows_by_tenant.items():
            num_rows_meanwhile = self.timer.in_rows(strategy_seconds.get(tenant, 0.0), num_rows)
            self.waiting.charge(tenant, num_tokens + num_rows_meanwhile)
        return rows_by_tenant

    # -- sharing rows between keys

    def _make_room(self, scheduled: ScheduledRequest) -> bool:
        """Find rows and pages for a request, if need be by taking them from keys that have more."""
        while self.num_running_rows + scheduled.num_rows > self.max_num_seqs:
            victim = self._choose_victim(scheduled)
            if victim is None:
                return False
            self._pause(victim)
        if scheduled.holds_pages:
            return True
        while not self._allocate(scheduled):
            victim = self._choose_victim(scheduled, for_pages=True)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _choose_victim(
        self, scheduled: ScheduledRequest, *, for_pages: bool = False
    ) -> ScheduledRequest | None:
        """A request of another tenant that gives its rows, or its pages, to this one; None if nobody has to.

        What was admitted a moment ago does not give way, or two requests could take turns for ever.
        """
        pool = self.allocator.pool
        if for_pages:
            candidates = [other for other in (*self.running, *self.paused) if other.can_recompute]
            shares = Shares(self.waiting, self._pages_by_tenant(), pool.num_pages, scheduled.tenant)
            num_needed = pool.pages_for(self._num_first_slots(scheduled))
        else:
            candidates = [other for other in self.running if self._may_pause(other, scheduled)]
            shares = Shares(self.waiting, self.rows_by_tenant, self.max_num_seqs, scheduled.tenant)
            num_needed = scheduled.num_rows

        def gives_way(other: ScheduledRequest) -> bool:
            if other is scheduled or other in self.newly_started:
                return False
            if for_pages:  # what is computed again must not outweigh what is gained
                num_recomputed = len(scheduled.inputs) + len(other.inputs)
                return shares.gives_way(
                    other.tenant, len(other.page_table.pages), num_needed, LIGHT_LAG + num_recomputed
                )
            return shares.gives_way(other.tenant, other.num_rows, num_needed, LIGHT_LAG)

        if shares.is_alone:
            return None
        return max(
            filter(gives_way, candidates),
            key=lambda other: (self.waiting.rank(other.tenant), other.admission_order),
            default=None,
        )

    def _pages_by_tenant(self) -> Counter[Tenant]:
        held: Counter[Tenant] = Counter()
        for scheduled in (*self.running, *self.paused):
            held[scheduled.tenant] += len(scheduled.page_table.pages)
        return held

    def _may_pause(self, victim: ScheduledRequest, newcomer: ScheduledRequest) -> bool:
        """Paused requests keep their pages: not more of them than there are rows."""
        num_paused_rows = sum(paused.num_rows for paused in self.paused)
        num_new_rows = 0 if newcomer in self.paused else newcomer.num_rows
        return num_paused_rows + victim.num_rows + num_new_rows <= self.max_num_seqs

    def _pause(self, victim: ScheduledRequest) -> None:
        """Take a request out of the batch; it keeps its pages, and goes on where it stopped."""
        self._leave_batch(victim)
        self.paused[victim] = None
        self.newly_paused.append(victim)
        self.waiting.push(victim.tenant, victim, front=True)

    def _preempt(self, victim: ScheduledRequest) -> None:
        """Take a request's pages away; it is recomputed later, from the head of its tenant's queue."""
        if victim in self.running:
            self.release(victim)
            self.waiting.push(victim.tenant, victim, front=True)
        else:
            self._free_waiting(victim)
        victim.preempt()
        victim.num_preemptions += 1
        self.newly_paused.append(victim)
        self.preemptions += 1

    def _free_waiting(self, scheduled: ScheduledRequest) -> None:
        self.paused.pop(scheduled, None)
        self.allocator.free(scheduled.page_table)

    def take_paused(self) -> list[ScheduledRequest]:
        """The requests that were paused or preempted since the last call."""
        paused = self.newly_paused
        self.newly_paused = []
        return paused

    # -- what to run

    def schedule_encode(self) -> list[ScheduledRequest]:
        """Requests whose source to encode now, the least served first."""
        pending = [scheduled for scheduled in self.pending if scheduled.needs_encoding]
        return self._fit_chunk(pending, lambda scheduled: len(scheduled.source), self.prefill_chunk_size)

    def schedule_prefill(self) -> list[tuple[ScheduledRequest, int]]:
        """Requests of whose prompt to prefill one chunk now, each with the size of the chunk."""
        pending = [
            scheduled for scheduled in self.pending if scheduled.num_pending and not scheduled.needs_encoding
        ]
        if not pending:
            return []
        budget = self.prefill_budget()
        batch = self._fit_chunk(pending, lambda scheduled: min(scheduled.num_pending, budget), budget)
        return [
            (scheduled, min(budget, scheduled.num_pending))
            if not scheduled.is_deterministic
            else (scheduled, min(self.prefill_chunk_size, DETERMINISTIC_CHUNK_SIZE, scheduled.num_pending))
            for scheduled in batch
        ]

    def prefill_budget(self) -> int:
        """Tokens of prompts to prefill in this step.

        If others decode meanwhile, no more than takes `PREFILL_SHARE` of their step.
        """
        seconds = self.slice_seconds()
        if seconds is None:
            return self.prefill_chunk_size
        return self.timer.prefill_tokens(
            seconds, min(MIN_CHUNK_SIZE, self.prefill_chunk_size), self.prefill_chunk_size
        )

    def slice_seconds(self) -> float | None:
        """Seconds that work other than decoding may take in this step; None if nobody decodes."""
        num_rows = self.num_running_rows - sum(scheduled.num_rows for scheduled in self.pending)
        if not num_rows or not self.slices_by_time:
            return None
        return max(MIN_SLICE_SECONDS, PREFILL_SHARE * self.timer.estimate_decode(num_rows))

    def cache_prefixes(self, batch: Iterable[ScheduledRequest]) -> None:
        """Put the pages of prompts that are now complete into the prefix cache."""
        if self.prefix_cache is None:
            return
        for scheduled in batch:
            if scheduled.uses_prefix_cache and not scheduled.num_pending and scheduled in self.running:
                self.prefix_cache.insert(scheduled.tenant, scheduled.inputs, scheduled.page_table.pages)

    def schedule_decode(self) -> list[ScheduledRequest]:
        """Requests to decode one token for.

        Each has a slot for the token; requests with equally many rows stand side by side.
        """
        self.num_steps += 1
        decoding = [scheduled for scheduled in self.running if scheduled not in self.pending]
        batch = self._share_step(decoding)
        self.decodes_in_turns = len(batch) < len(decoding)
        preempted: set[ScheduledRequest] = set()
        for scheduled in batch:
            num_slots = scheduled.page_table.num_slots + scheduled.num_rows
            if num_slots <= len(scheduled.page_table.pages) * self.allocator.pool.page_size:
                continue
            while scheduled not in preempted and not self._reserve(scheduled.page_table, num_slots):
                victim = self._newest_recomputable()
                self._preempt(victim)
                preempted.add(victim)
        fitting = [scheduled for scheduled in batch if scheduled not in preempted]
        for scheduled in fitting:
            scheduled.last_decoded = self.num_steps
        return sorted(fitting, key=lambda scheduled: scheduled.num_rows)

    def _share_step(self, ready: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Who decodes in this step: all, unless a key was served much less than another.

        Then its rows decode in every step, and those of the others in turns, as many as take `HEAVY_SHARE` of
        the step that it would have alone.
        """
        keys = {tenant.key for tenant in self.rows_by_tenant}
        if len(keys) > 1 and self.pending:
            keys = {scheduled.tenant.key for scheduled in ready}
        if len(keys) < 2:
            self.spare_seconds = 0.0
            return ready
        heaviest = max(keys, key=lambda key: self.waiting.key_usage.get(key, 0.0))
        light_keys = {key for key in keys if self.waiting.lag(key, heaviest) >= LIGHT_LAG}
        if not light_keys:
            self.spare_seconds = 0.0
            return ready
        chosen = [scheduled for scheduled in ready if scheduled.tenant.key in light_keys]
        num_rows = sum(scheduled.num_rows for scheduled in chosen)
        strategy_seconds = sum(scheduled.strategy_seconds for scheduled in chosen)
        light_seconds = self.timer.estimate_decode(num_rows) + strategy_seconds
        self.spare_seconds += HEAVY_SHARE * light_seconds
        heavy = [scheduled for scheduled in ready if scheduled.tenant.key not in light_keys]
        heavy.sort(key=lambda scheduled: scheduled.last_decoded)
        spent = 0.0
        for scheduled in heavy:
            decode_seconds = self.timer.estimate_decode(num_rows + scheduled.num_rows)
            seconds = decode_seconds + strategy_seconds + scheduled.strategy_seconds - light_seconds
            if seconds > self.spare_seconds:
                break
            num_rows += scheduled.num_rows
            strategy_seconds += scheduled.strategy_seconds
            spent = seconds
            chosen.append(scheduled)
        self.spare_seconds -= spent
        if len(chosen) == len(ready):
            self.spare_seconds = 0.0
        order = {scheduled: n for n, scheduled in enumerate(ready)}
        return sorted(chosen, key=order.__getitem__)

    def _newest_recomputable(self) -> ScheduledRequest:
        """The request whose pages are taken away next: of the key that was served most, weights considered,
        a paused one, or else the newest that runs.

        Requests of several sequences are not among them: they hold all the pages that they can need.
        """
        candidates = (other for other in (*self.running, *self.paused) if other.can_recompute)
        return max(
            candidates,
            key=lambda other: (
                self.waiting.key_usage.get(other.tenant.key, 0.0),
                other in self.paused,
                other.admission_order,
            ),
        )

    # -- pages and budget

    def _allocate(self, scheduled: ScheduledRequest) -> bool:
        """Reserve pages for the prompt.

        Several sequences get all that they may ever need, as they cannot be preempted, and leave some of the
        pages to others.
        """
        page_table = scheduled.page_table
        prefix_cache = self.prefix_cache if scheduled.uses_prefix_cache else None
        cached_pages: list[int] = []
        if prefix_cache is not None:
            cached_pages = prefix_cache.match(scheduled.tenant, scheduled.inputs)
            self.allocator.attach_prefix(page_table, cached_pages)
        # what was preempted leaves a page to each running request, which would preempt it again to grow
        num_spare_pages = len(self.running) if scheduled.num_preemptions else 0
        if (
            (scheduled.can_recompute or self._leaves_reserve(scheduled))
            and self._reserve(page_table, self._num_first_slots(scheduled), num_spare_pages)
            and self._reserve_source(scheduled)
        ):
            if prefix_cache is not None:
                prefix_cache.count_hits(scheduled.inputs, cached_pages)
            return True
        self.allocator.free(page_table)
        return False

    def _num_first_slots(self, scheduled: ScheduledRequest) -> int:
        """KV slots that a request gets when it is admitted."""
        return len(scheduled.inputs) + 1 if scheduled.can_recompute else scheduled.max_slots

    def _leaves_reserve(self, scheduled: ScheduledRequest) -> bool:
        """Whether pages are left if this request takes all that it may need; it may run alone anyway."""
        pool = self.allocator.pool
        others = (*self.running, *self.paused)
        held = sum(len(other.page_table.pages) for other in others if not other.can_recompute)
        if not held:
            return True
        return held + pool.pages_for(scheduled.max_slots) <= pool.num_pages * (1 - RESERVED_FRACTION)

    def _reserve_source(self, scheduled: ScheduledRequest) -> bool:
        source_pool = self.allocator.source_pool
        if source_pool is None or not scheduled.source:
            return True
        return self.allocator.reserve_source(scheduled.page_table, len(scheduled.source))

    def _reserve(self, page_table: PageTable, num_slots: int, num_spare_pages: int = 0) -> bool:
        """Reserve pages for `num_slots` slots, evicting from the prefix cache where the pool is short.

        False, and nothing is reserved, where fewer than `num_spare_pages` would be left.
        """
        pool = self.allocator.pool
        num_needed = pool.pages_for(num_slots) - len(page_table.pages) + num_spare_pages
        if pool.num_free < num_needed and self.prefix_cache is not None:
            self.prefix_cache.evict(num_needed)
        return pool.num_free >= num_needed and self.allocator.reserve(page_table, num_slots)

    def _fit_chunk(
        self, candidates: list[AnyRequest], length: Callable[[AnyRequest], int], budget: int
    ) -> list[AnyRequest]:
        """As many as fit into `budget` tokens, padding included; at least one, the least served."""
        candidates.sort(key=lambda scheduled: (self.waiting.rank(scheduled.tenant), length(scheduled)))
        batch: list[AnyRequest] = []
        max_length = 0
        for scheduled in candidates:
            max_length = max(max_length, length(scheduled))
            if batch and max_length * (len(batch) + 1) > budget:
                break
            batch.append(scheduled)
        return batch


def split_deterministic(batch: list[AnyRequest]) -> list[list[AnyRequest]]:
    """Put each request that must be deterministic into a batch of its own.

    Its logits are then the same bit for bit, whatever else is being served.
    """
    batchable = [scheduled for scheduled in batch if not scheduled.is_deterministic]
    alone = [[scheduled] for scheduled in batch if scheduled.is_deterministic]
    return [batchable, *alone] if batchable else alone


def handle_of(item: ScheduledRequest | RequestHandle) -> RequestHandle:
    return item if isinstance(item, RequestHandle) else item.handle
