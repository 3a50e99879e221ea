"""Requests on their way through the engine, and what is heard of them; given up as soon as nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from keepleft.serving.engine.request import Event, FinishEvent, GenerationRequest, RequestHandle
from keepleft.serving.engine.thread import EngineThread


class QueueListener:
    """Of one ticket. It hears in its own event loop."""

    def __init__(self, queue: asyncio.Queue[tuple[int, Event]], index: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue = queue
        self.index = index

    def __call__(self, event: Event) -> None:
        self.queue.put_nowait((self.index, event))


class RequestStreams:
    """Several asks of one caller: when this is made all of them are on their way, or none and an error says
    why.
    """

    def __init__(self, engine_thread: EngineThread, requests: Sequence[GenerationRequest]) -> None:
        self.engine_thread = engine_thread
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.handles: list[RequestHandle] = []
        self.finished: set[int] = set()
        try:
            for n, request in enumerate(requests):
                self.handles.append(engine_thread.submit(request, QueueListener(self.queue, n)))
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        """(which ask, event) until each has ended."""
        while len(self.finished) < len(self.handles):
            index, event = await self.queue.get()
            if isinstance(event, FinishEvent) and event.last:
                self.finished.add(index)
            yield index, event

    def cancel(self, index: int) -> None:
        """Nothing more of this one is of use."""
        self.engine_thread.cancel(self.handles[index])

    def close(self) -> None:
        """Nobody listens any more: what has not ended is given up at once."""
        for n in range(len(self.handles)):
            if n not in self.finished:
                self.cancel(n)
