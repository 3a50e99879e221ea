"""The engine's thread: requests from any thread, tasks between its steps, and an orderly shutdown."""

from __future__ import annotations

import threading
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
STOP_SECONDS = 10.0  # how long to wait for cancelled requests, and for the thread to end


def deliver(events: Events) -> None:
    """Pass every event to its handle's `on_event`."""
    for handle, event in events:
        handle.on_event(event)


class EngineThread:
    """Runs an engine in a thread of its own.

    At most `max_requests` are in flight and `max_tasks` wait; `on_events` gets all events of a step at once.
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
        self.closed = False  # accepts no more requests
        self.stopped = False  # the thread ends
        self.failures = 0
        self.thread = threading.Thread(target=self._run, name="keepleft engine", daemon=True)
        self.thread.start()

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None] = lambda event: None
    ) -> RequestHandle:
        """Queue a request.

        Raises ValueError if it can never be served, OverloadedError if the queue is full, ShuttingDownError
        if the engine is shutting down.
        """
        self.engine.validate(request)
        handle = RequestHandle(request, on_event)
        with self.condition:
            if self.closed:
                raise ShuttingDownError("the server is shutting down: ask another one")
            if len(self.in_flight) >= self.max_requests:
                raise OverloadedError(
                    f"{self.max_requests} requests are in flight already: try again in a moment"
                )
            self.in_flight.add(handle)
            self.incoming.append(handle)
            self.condition.notify()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request: the next step frees what it holds."""
        with self.condition:
            handle.cancelled = True
            self.condition.notify()

    def run_between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function in the engine's thread, between two steps; errors as `submit` raises them."""
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
        """Accept no more requests, give those in flight `seconds` to finish, and cancel the rest.

        The thread then ends. Returns whether all requests and tasks could finish.
        """
        with self.condition:
            self.closed = True
            self.condition.notify()
            all_finished = self.condition.wait_for(
                lambda: not self.in_flight and not self.tasks, max(0.0, seconds)
            )
            for handle in self.in_flight:
                handle.cancelled = True
            self.condition.notify()
            self.condition.wait_for(lambda: not self.in_flight, STOP_SECONDS)
            self.stopped = True
            self.condition.notify()
        self.thread.join(STOP_SECONDS)
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
        except Exception as error:  # fails all its requests, but not the server
            self.failures += 1
            handles = list(self.in_flight)
            self.engine.clear()
            message = f"the model could not go on: {type(error).__name__}"
            return [(handle, FinishEvent(0, "failed", message=message, last=True)) for handle in handles]

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
    except BaseException as error:  # raised where the result is awaited
        future.set_exception(error)


def run_in_own_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread that ends with it; returns its result or raises its error.

    OpenMP keeps a team of worker threads for every thread that ever ran a parallel region. Two teams on the
    same cores stop spinning for work, and the small steps of an engine take half as long again. So models are
    loaded in a thread that takes its team along when it ends, and the engine's team is the only one.
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
