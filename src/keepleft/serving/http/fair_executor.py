"""Threads for work that does not use the model: API keys take turns, by the time that their work took."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from keepleft.serving.engine.fair_queue import FairQueue
from keepleft.serving.engine.request import OverloadedError, ShuttingDownError, Tenant

Result = TypeVar("Result")
USAGE_PER_SECOND = 1000.0  # the queue counts milliseconds


class FairExecutor:
    """`num_threads` start when first needed; at most `max_waiting` calls of one key wait."""

    def __init__(self, num_threads: int, name: str, *, max_waiting: int = 4096) -> None:
        self.num_threads = num_threads
        self.name = name
        self.max_waiting = max_waiting
        self.condition = threading.Condition()
        self.waiting: FairQueue[tuple[Tenant, Callable[[], Any], Future[Any]]] = FairQueue()
        self.num_waiting: Counter[str] = Counter()  # by key
        self.threads: list[threading.Thread] = []
        self.num_idle = 0
        self.closed = False

    async def run(self, tenant: Tenant, work: Callable[[], Result]) -> Result:
        """The result of the work; skipped if the caller is cancelled before its turn comes.

        Raises OverloadedError if too many calls of the key wait, ShuttingDownError after `shutdown`.
        """
        return await asyncio.wrap_future(self.submit(tenant, work))

    def submit(self, tenant: Tenant, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self.condition:
            if self.closed:
                raise ShuttingDownError()
            if self.num_waiting[tenant.key] >= self.max_waiting:
                raise OverloadedError(
                    f"{self.max_waiting} requests of yours wait for this already: try again in a moment"
                )
            self.num_waiting[tenant.key] += 1
            self.waiting.push(tenant, (tenant, work, future))
            if not self.num_idle and len(self.threads) < self.num_threads:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self.threads.append(thread)
                thread.start()
            self.condition.notify()
        return future

    def counts(self) -> tuple[int, int]:
        """How many calls run and how many wait."""
        with self.condition:
            return len(self.threads) - self.num_idle, self.num_waiting.total()

    def shutdown(self) -> None:
        """End the threads when they are done with what they do now; what waits fails."""
        with self.condition:
            self.closed = True
            for _, _, future in self.waiting.items():
                with suppress(InvalidStateError):  # the caller has left
                    future.set_exception(ShuttingDownError())
            self.condition.notify_all()

    def _run(self) -> None:
        while True:
            with self.condition:
                self.num_idle += 1
                self.condition.wait_for(lambda: len(self.waiting) or self.closed)
                self.num_idle -= 1
                if self.closed:
                    return
                tenant, work, future = self.waiting.pop()
                self.num_waiting[tenant.key] -= 1
                if not self.num_waiting[tenant.key]:
                    del self.num_waiting[tenant.key]
            if not future.set_running_or_notify_cancel():
                continue
            start = time.monotonic()
            try:
                result = work()
            except Exception as error:  # raised where the result is awaited
                future.set_exception(error)
            except BaseException as error:  # a panic of a library in Rust: the routes handle an Exception
                panic = RuntimeError(f"{type(error).__name__}: {error}")
                panic.__cause__ = error
                future.set_exception(panic)
            else:
                future.set_result(result)
            with self.condition:
                self.waiting.charge(tenant, USAGE_PER_SECOND * (time.monotonic() - start))
            del work, future  # what they hold is not kept until the next call
