"""The engine requests of one HTTP request: their events in one queue, or the results of prompt requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast

from torch import Tensor

from keepleft.decoding.score import ScoredToken
from keepleft.serving.engine.request import (
    Event,
    FinishEvent,
    OverloadedError,
    PromptRequest,
    PromptResult,
    Request,
    RequestHandle,
    ShuttingDownError,
)
from keepleft.serving.engine.thread import EngineThread
from keepleft.serving.http.errors import APIError

TURN_SECONDS = 0.002  # after which other tasks of the event loop have theirs
MAX_BACKLOG = 4096  # events that may wait for a client that does not read
RETRY_SECONDS = 0.05  # until a request is submitted again for which there was no place
MAX_BLOCKED_SECONDS = 5.0  # for a client with a longer backlog to receive one piece of its response


class QueueListener:
    """Takes the events of one request; called in the event loop that made it."""

    def __init__(self, engine_requests: EngineRequests, index: int) -> None:
        self.loop = asyncio.get_running_loop()  # service.deliver_to_loops reads it
        self.engine_requests = engine_requests
        self.index = index

    def __call__(self, event: Event) -> None:
        self.engine_requests.put(self.index, event)


class EngineRequests:
    """The engine requests of one HTTP request, with their events in one queue.

    The queue is bounded: where the client does not read, the requests are cancelled.
    """

    def __init__(self, engine_thread: EngineThread) -> None:
        self.engine_thread = engine_thread
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.handles: list[RequestHandle] = []
        self.waiting: deque[Request] = deque()  # to be submitted when others have finished
        self.max_in_flight: int | None = None
        self.finished: set[int] = set()
        self.blocked_since: float | None = None  # on the loop's clock: the client has to receive something
        self.error: APIError | None = None  # why they were cancelled
        self.turn_start = 0.0

    def submit(self, requests: Sequence[Request], *, max_in_flight: int | None = None) -> None:
        """Submit all requests, or none. Raises what EngineThread.submit raises.

        With `max_in_flight`, no more than so many at a time, and no more than their tenant has places for:
        the others are submitted by `events` as those finish. Then at least one must find a place.
        """
        self.max_in_flight = max_in_flight
        try:
            for request in requests:
                self.engine_thread.engine.validate(request)
            self.waiting.extend(requests)
            self._submit_waiting()
        except BaseException:
            self.close()
            raise

    def _submit_waiting(self) -> None:
        while self.waiting and (self.max_in_flight is None or self.num_in_flight < self.max_in_flight):
            try:
                handle = self.engine_thread.submit(self.waiting[0], QueueListener(self, len(self.handles)))
            except OverloadedError:
                if self.max_in_flight is None or not self.handles:
                    raise
                return
            self.handles.append(handle)
            self.waiting.popleft()

    @property
    def num_in_flight(self) -> int:
        return len(self.handles) - len(self.finished)

    def put(self, index: int, event: Event) -> None:
        """Queue an event, or cancel all requests if the client does not read."""
        if self.error is not None:
            return
        self.queue.put_nowait((index, event))
        if self.queue.qsize() > MAX_BACKLOG and self.blocked_since is not None:
            blocked_seconds = asyncio.get_running_loop().time() - self.blocked_since
            if blocked_seconds > MAX_BLOCKED_SECONDS:
                self.error = APIError(
                    408,
                    f"{self.queue.qsize():,} tokens wait for this client, which has received none for "
                    f"{blocked_seconds:.0f} seconds: read the stream faster, or ask for fewer choices",
                    code="client_too_slow",
                )
                self.close()
                self.queue = asyncio.Queue()

    async def take_turns(self) -> None:
        """Let other tasks run if this one has run for long. It need not wait for a full queue, nor for a
        client that reads at once."""
        loop = asyncio.get_running_loop()
        if loop.time() - self.turn_start > TURN_SECONDS:
            await asyncio.sleep(0)
            self.turn_start = loop.time()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(index of the request, event) until all requests have finished.

        Raises APIError after they were cancelled since the client does not read.
        """
        while self.num_in_flight or self.waiting:
            if self.error is not None:
                raise self.error
            self._submit_waiting()
            if self.queue.empty():
                if not self.num_in_flight:  # others of the tenant have taken all places
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                index, event = await self.queue.get()
                self.turn_start = asyncio.get_running_loop().time()
            else:
                await self.take_turns()
                index, event = self.queue.get_nowait()
            if isinstance(event, FinishEvent) and event.last:
                self.finished.add(index)
            yield index, event

    def cancel(self, index: int) -> None:
        self.engine_thread.cancel(self.handles[index])

    def close(self) -> None:
        """Cancel the requests that have not finished."""
        self.waiting.clear()
        for n in range(len(self.handles)):
            if n not in self.finished:
                self.cancel(n)


async def _read_prompts(engine_thread: EngineThread, requests: Sequence[PromptRequest]) -> list[PromptResult]:
    """The results of the requests, in their order. If the caller is cancelled, so are they."""
    engine_requests = EngineRequests(engine_thread)
    engine_requests.submit(requests)
    results: dict[int, PromptResult] = {}
    try:
        async for index, event in engine_requests.events():
            assert isinstance(event, FinishEvent)
            if event.result is None:
                raise finish_error(event)
            results[index] = event.result
    finally:
        engine_requests.close()
    return [results[n] for n in range(len(requests))]


async def score_prompts(
    engine_thread: EngineThread, requests: Sequence[PromptRequest]
) -> list[list[ScoredToken]]:
    """The scored tokens of each request."""
    return cast(list[list[ScoredToken]], await _read_prompts(engine_thread, requests))


async def pool_prompts(engine_thread: EngineThread, requests: Sequence[PromptRequest]) -> list[Tensor]:
    """The embedding, or the label probabilities, of each request."""
    return cast(list[Tensor], await _read_prompts(engine_thread, requests))


def finish_error(event: FinishEvent) -> Exception:
    if event.finish_reason == "cancelled":
        return ShuttingDownError(
            "the server is shutting down, and this request was not finished in time: try another server"
        )
    if event.finish_reason == "invalid":
        return APIError(400, event.message, code="invalid_request")
    return APIError(500, event.message or "the model failed", code="model_failed")
