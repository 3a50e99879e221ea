"""The engine requests of one HTTP request: their events in one queue, or the results of prompt requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

from torch import Tensor

from keepleft.decoding.score import ScoredToken
from keepleft.serving.engine.request import (
    Event,
    FinishEvent,
    PromptRequest,
    PromptResult,
    Request,
    RequestHandle,
    ShuttingDownError,
)
from keepleft.serving.engine.thread import EngineThread
from keepleft.serving.http.errors import APIError


class QueueListener:
    """Puts the events of one request into a queue; called in the event loop that made it."""

    def __init__(self, queue: asyncio.Queue[tuple[int, Event]], index: int) -> None:
        self.loop = asyncio.get_running_loop()  # service.deliver_to_loops reads it
        self.queue = queue
        self.index = index

    def __call__(self, event: Event) -> None:
        self.queue.put_nowait((self.index, event))


class EngineRequests:
    """The engine requests of one HTTP request, with their events in one queue."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self.engine_thread = engine_thread
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.handles: list[RequestHandle] = []
        self.finished: set[int] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit all requests, or none. Raises what EngineThread.submit raises."""
        try:
            for n, request in enumerate(requests):
                self.handles.append(self.engine_thread.submit(request, QueueListener(self.queue, n)))
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(index of the request, event) until all requests have finished."""
        while len(self.finished) < len(self.handles):
            index, event = await self.queue.get()
            if isinstance(event, FinishEvent) and event.last:
                self.finished.add(index)
            yield index, event

    def cancel(self, index: int) -> None:
        self.engine_thread.cancel(self.handles[index])

    def close(self) -> None:
        """Cancel the requests that have not finished."""
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
