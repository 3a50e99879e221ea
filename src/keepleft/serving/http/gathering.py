"""Rows of many callers read together: whatever waits when the engine has time for it becomes one padded batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from keepleft.serving.asks import FullError
from keepleft.serving.http.limits import Limits
from keepleft.serving.running import Running


class Gathered:
    """`work` gives one result for each row of tokens, in their order."""

    def __init__(self, running: Running, work: Callable[[Sequence[Sequence[int]]], Any], limits: Limits) -> None:
        self.running, self.work = running, work
        self.most, self.rows = limits.batch_tokens, limits.inputs * limits.errands
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Sequence[int], Future[Any]]] = deque()
        self.sent = False  # an errand is on its way that will take what waits
        self.batches = 0

    async def ask(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """The results, when they are there; rows that nobody waits for any more are not read."""
        mine: list[Future[Any]] = [Future() for _ in rows]
        with self.lock:
            if len(self.waiting) + len(rows) > self.rows:
                raise FullError(f"{len(self.waiting)} texts wait to be read already: try again in a moment")
            self.waiting.extend(zip(rows, mine, strict=True))
        try:
            self._send()
            return list(await asyncio.gather(*map(asyncio.wrap_future, mine)))
        finally:
            for future in mine:
                future.cancel()

    def _send(self) -> None:
        with self.lock:
            if self.sent or not self.waiting:
                return
            self.sent = True
        try:
            self.running.errand(self._run)
        except BaseException:
            with self.lock:
                self.sent = False
            raise

    def _run(self) -> None:
        """In the engine's thread."""
        batch = self._taken()
        try:
            if batch:
                self.batches += 1
                for (_, future), result in zip(batch, self.work([row for row, _ in batch]), strict=True):
                    future.set_result(result)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        with self.lock:
            self.sent = False
        try:
            self._send()
        except Exception as error:
            for _, future in self._taken(all=True):
                future.set_exception(error)

    def _taken(self, all: bool = False) -> list[tuple[Sequence[int], Future[Any]]]:
        """The next batch: those that came first, as long as they fit."""
        out: list[tuple[Sequence[int], Future[Any]]] = []
        longest = 0
        with self.lock:
            while self.waiting:
                longest = max(longest, len(self.waiting[0][0]))
                if not all and out and longest * (len(out) + 1) > self.most:
                    break
                row, future = self.waiting.popleft()
                if future.set_running_or_notify_cancel():
                    out.append((row, future))
        return out
