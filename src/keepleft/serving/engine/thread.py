"""An engine in a thread of its own: requests from anywhere, errands between its steps, and an orderly end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from keepleft.serving.engine.request import (
    Engine,
    Event,
    Events,
    FinishEvent,
    GenerationRequest,
    OverloadedError,
    RequestHandle,
    ShuttingDownError,
)

Result = TypeVar("Result")


def deliver(events: Events) -> None:
    """Every event to whoever waits for it."""
    for handle, event in events:
        handle.on_event(event)


class EngineThread:
    """`max_requests` may be on their way and `max_tasks` wait; `on_events` gets what each step has to tell,
    all at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int = 1024,
        max_tasks: int = 64,
        on_events: Callable[[Events], None] = deliver,
    ) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self.max_tasks = max_tasks
        self.on_events = on_events
        self.condition = threading.Condition()
        self.incoming: deque[RequestHandle] = deque()
        self.tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.in_flight: set[RequestHandle] = set()
        self.closed = self.stopped = False
        self.failures = 0
        self.thread = threading.Thread(target=self._run, name="keepleft engine", daemon=True)
        self.thread.start()

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None] = lambda event: None
    ) -> RequestHandle:
        """A request on its way, or an error: ValueError (never), OverloadedError (not now), ShuttingDownError
        (no more).
        """
        self.engine.validate(request)
        handle = RequestHandle(request, on_event)
        with self.condition:
            if self.closed:
                raise ShuttingDownError("the server is shutting down: ask another one")
            if len(self.in_flight) >= self.max_requests:
                raise OverloadedError(
                    f"{self.max_requests} requests are on their way already: try again in a moment"
                )
            self.in_flight.add(handle)
            self.incoming.append(handle)
            self.condition.notify()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Nobody waits for it any more: what it holds is free with the next step."""
        with self.condition:
            handle.cancelled = True
            self.condition.notify()

    def run_between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        """Something else to do with the model, between two steps."""
        future: Future[Result] = Future()
        with self.condition:
            if self.closed:
                raise ShuttingDownError("the server is shutting down: ask another one")
            if len(self.tasks) >= self.max_tasks:
                raise OverloadedError(f"{self.max_tasks} questions wait already: try again in a moment")
            self.tasks.append((function, future))
            self.condition.notify()
        return future

    def drain(self, seconds: float) -> bool:
        """No more requests; those on their way may end, for so long. The rest is cancelled.

        Were all able to end?
        """
        with self.condition:
            self.closed = True
            self.condition.notify()
        deadline = time.monotonic() + seconds
        with self.condition:
            all_finished = self.condition.wait_for(
                lambda: not self.in_flight and not self.tasks, max(0.0, deadline - time.monotonic())
            )
            for handle in self.in_flight:
                handle.cancelled = True
            self.condition.notify()
            self.condition.wait_for(lambda: not self.in_flight, 10.0)
            self.stopped = True
            self.condition.notify()
        self.thread.join(10.0)
        return all_finished

    def stats(self) -> dict[str, float]:
        with self.condition:
            return {
                **self.engine.stats(),
                "in_flight": len(self.in_flight),
                "tasks": len(self.tasks),
                "failures": self.failures,
            }

    def _run(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(
                    lambda: self.incoming or self.tasks or self.engine.busy or self.stopped
                )
                if self.stopped:
                    break
                incoming = self.incoming
                self.incoming = deque()
                task = self.tasks.popleft() if self.tasks else None
            for handle in incoming:
                self.engine.submit(handle)
            if task is not None:
                _run_task(*task)
            if self.engine.busy:
                self._publish(self._step())
            with self.condition:
                self.condition.notify_all()
        for _, future in self.tasks:
            future.cancel()

    def _step(self) -> Events:
        try:
            return self.engine.step()
        except (
            Exception
        ) as error:  # an engine that fails as a whole takes its requests along, but not the server
            self.failures += 1
            handles = list(self.in_flight)
            self.engine.clear()
            return [
                (
                    handle,
                    FinishEvent(
                        0, "failed", message=f"the model could not go on: {type(error).__name__}", last=True
                    ),
                )
                for handle in handles
            ]

    def _publish(self, events: Events) -> None:
        finished = [handle for handle, event in events if isinstance(event, FinishEvent) and event.last]
        if events:
            self.on_events(events)
        if finished:
            with self.condition:
                self.in_flight.difference_update(finished)


def _run_task(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # whoever waits for it gets it
        future.set_exception(error)


def run_in_own_thread(function: Callable[[], Result]) -> Result:
    """What a function gives, worked out in a thread of its own; its errors too.

    OpenMP keeps a team of helpers for every thread that ever computed with several. Two teams on the same
    cores do not wait for work actively any more, and the small steps of an engine take half as long again. So
    whoever loads a model does it in a thread that takes its team along when it ends, and the engine's team is
    the only one.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="keepleft setup", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
