"""Requests on their way through the engine, and what is heard of them; given up as soon as nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from keepleft.serving.asks import Ask, End, Event, Ticket
from keepleft.serving.running import Running


class Ear:
    """Of one ticket. It hears in its own event loop."""

    def __init__(self, queue: asyncio.Queue[tuple[int, Event]], number: int) -> None:
        self.loop, self.queue, self.number = asyncio.get_running_loop(), queue, number

    def __call__(self, event: Event) -> None:
        self.queue.put_nowait((self.number, event))


class Hearing:
    """Several asks of one caller: when this is made all of them are on their way, or none and an error says why."""

    def __init__(self, running: Running, asks: Sequence[Ask]) -> None:
        self.running = running
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self.over: set[int] = set()
        try:
            for n, ask in enumerate(asks):
                self.tickets.append(running.submit(ask, Ear(self.queue, n)))
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        """(which ask, event) until each has ended."""
        while len(self.over) < len(self.tickets):
            number, event = await self.queue.get()
            if isinstance(event, End) and event.last:
                self.over.add(number)
            yield number, event

    def drop(self, number: int) -> None:
        """Nothing more of this one is of use."""
        self.running.cancel(self.tickets[number])

    def close(self) -> None:
        """Nobody listens any more: what has not ended is given up at once."""
        for n in range(len(self.tickets)):
            if n not in self.over:
                self.drop(n)
