"""Requests to the engine from any thread: submit some, wait for all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from keepleft.serving.engine.request import (
    Engine,
    Event,
    FinishEvent,
    Request,
    RequestHandle,
    ShuttingDownError,
)
from keepleft.serving.engine.thread import EngineThread

UNLIMITED = 1 << 62  # requests in flight: they come from the parts of one job


class EngineClient:
    """An engine in its thread. Requests of several callers are served together."""

    def __init__(self, engine: Engine) -> None:
        self.thread = EngineThread(engine, max_requests=UNLIMITED, max_prompts=UNLIMITED)

    def run(self, requests: Sequence[Request]) -> list[list[FinishEvent]]:
        """The ends of all sequences of each request, in the order of the sequences.

        Raises ValueError for a request that is at fault, RuntimeError where the engine is, and
        ShuttingDownError once it is closed: then nothing is known about the requests.
        """
        out: list[list[FinishEvent]] = [[] for _ in requests]
        pending = len(requests)
        condition = threading.Condition()
        handles: list[RequestHandle] = []

        def collect(index: int, event: Event) -> None:
            nonlocal pending
            if not isinstance(event, FinishEvent):
                return
            with condition:
                out[index].append(event)
                pending -= event.last
                condition.notify()

        try:
            for n, request in enumerate(requests):
                handles.append(self.thread.submit(request, partial(collect, n)))
            with condition:
                while not condition.wait_for(lambda: not pending, timeout=1.0):
                    if self.thread.ended:
                        raise ShuttingDownError("the engine's thread has ended")
        except BaseException:  # nobody waits for the others any more
            for handle in handles:
                self.thread.cancel(handle)
            raise
        for events in out:
            for event in events:
                if event.finish_reason == "cancelled":
                    raise ShuttingDownError("the engine was closed")
                if event.finish_reason == "invalid":
                    raise ValueError(event.message)
                if event.finish_reason == "failed":
                    raise RuntimeError(event.message)
        return [sorted(events, key=lambda event: event.index) for events in out]

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        self.thread.drain(0.0)
