"""Dynamic batching of embeddings and labels: the rows waiting when the engine has time become one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from keepleft.serving.engine.request import OverloadedError
from keepleft.serving.engine.thread import EngineThread
from keepleft.serving.http.limits import Limits


class DynamicBatcher:
    """Batches rows of many clients. `batch_function` returns one result for each row of tokens, in order."""

    def __init__(
        self,
        engine_thread: EngineThread,
        batch_function: Callable[[Sequence[Sequence[int]]], Tensor],
        limits: Limits,
    ) -> None:
        self.engine_thread = engine_thread
        self.batch_function = batch_function
        self.max_batch_tokens = limits.batch_tokens
        self.max_waiting_rows = limits.inputs * limits.tasks
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Sequence[int], Future[Tensor]]] = deque()
        self.is_scheduled = False  # a task is queued that will take the waiting rows
        self.num_batches = 0

    async def submit(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """The results of the rows. If the caller is cancelled, rows that have not been batched are dropped.

        Raises OverloadedError if too many rows wait.
        """
        futures: list[Future[Tensor]] = [Future() for _ in rows]
        with self.lock:
            if len(self.waiting) + len(rows) > self.max_waiting_rows:
                raise OverloadedError(f"{len(self.waiting)} texts are waiting already: try again in a moment")
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
        """Run the next batch, and schedule the one after it. Called in the engine's thread."""
        batch = self._next_batch()
        try:
            if batch:
                self.num_batches += 1
                results = self.batch_function([row for row, _ in batch])
                for (_, future), result in zip(batch, results, strict=True):
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

    def _next_batch(self, take_all: bool = False) -> list[tuple[Sequence[int], Future[Tensor]]]:
        """As many waiting rows as fit into max_batch_tokens with padding, first come first served."""
        batch: list[tuple[Sequence[int], Future[Tensor]]] = []
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
