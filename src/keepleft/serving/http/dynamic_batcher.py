"""Rows of many callers read together: whatever waits when the engine has time for it becomes one padded
batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from keepleft.serving.engine.request import OverloadedError
from keepleft.serving.engine.thread import EngineThread
from keepleft.serving.http.limits import Limits


class DynamicBatcher:
    """`batch_function` gives one result for each row of tokens, in their order."""

    def __init__(
        self,
        engine_thread: EngineThread,
        batch_function: Callable[[Sequence[Sequence[int]]], Any],
        limits: Limits,
    ) -> None:
        self.engine_thread = engine_thread
        self.batch_function = batch_function
        self.max_batch_tokens = limits.batch_tokens
        self.max_waiting_rows = limits.inputs * limits.tasks
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Sequence[int], Future[Any]]] = deque()
        self.is_scheduled = False  # a task is on its way that will take what waits
        self.num_batches = 0

    async def submit(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """The results, when they are there; rows that nobody waits for any more are not read."""
        futures: list[Future[Any]] = [Future() for _ in rows]
        with self.lock:
            if len(self.waiting) + len(rows) > self.max_waiting_rows:
                raise OverloadedError(
                    f"{len(self.waiting)} texts wait to be read already: try again in a moment"
                )
            self.waiting.extend(zip(rows, futures, strict=True))
        try:
            self._schedule()
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()

    def _schedule(self) -> None:
        with self.lock:
            if self.is_scheduled or not self.waiting:
                return
            self.is_scheduled = True
        try:
            self.engine_thread.run_between_steps(self._run_batch)
        except BaseException:
            with self.lock:
                self.is_scheduled = False
            raise

    def _run_batch(self) -> None:
        """In the engine's thread."""
        batch = self._next_batch()
        try:
            if batch:
                self.num_batches += 1
                for (_, future), result in zip(
                    batch, self.batch_function([row for row, _ in batch]), strict=True
                ):
                    future.set_result(result)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        with self.lock:
            self.is_scheduled = False
        try:
            self._schedule()
        except Exception as error:
            for _, future in self._next_batch(take_all=True):
                future.set_exception(error)

    def _next_batch(self, take_all: bool = False) -> list[tuple[Sequence[int], Future[Any]]]:
        """The next batch: those that came first, as long as they fit."""
        batch: list[tuple[Sequence[int], Future[Any]]] = []
        max_length = 0
        with self.lock:
            while self.waiting:
                max_length = max(max_length, len(self.waiting[0][0]))
                if not take_all and batch and max_length * (len(batch) + 1) > self.max_batch_tokens:
                    break
                row, future = self.waiting.popleft()
                if future.set_running_or_notify_cancel():
                    batch.append((row, future))
        return batch
