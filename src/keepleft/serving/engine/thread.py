"""The engine's thread: requests from any thread, quotas by tenant, and an orderly shutdown."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from keepleft.serving.engine.activity import EngineStatus
from keepleft.serving.engine.request import (
    Engine,
    Event,
    Events,
    FinishEvent,
    OverloadedError,
    PromptRequest,
    Request,
    RequestHandle,
    ShuttingDownError,
    Tenant,
)

Result = TypeVar("Result")
STOP_SECONDS = 10.0  # how long to wait for cancelled requests, and for the thread to end
STATUS_INTERVAL_SECONDS = 0.25  # at least, between two statuses of an engine that is busy
USER_FACTOR = 8  # a user may have this many times as many requests in flight as its key has places left


def deliver(events: Events) -> None:
    """Pass every event to its handle's `on_event`."""
    for handle, event in events:
        handle.on_event(event)


class Quota:
    """Requests in flight: at most `maximum` of each key, whatever other keys do.

    A user may take no more than `USER_FACTOR` times what it leaves to the others of its key.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.by_key: Counter[str] = Counter()
        self.by_user: Counter[Tenant] = Counter()

    def add(self, tenant: Tenant) -> None:
        """Count a request. Raises OverloadedError if there are too many."""
        num_free = self.maximum - self.by_key[tenant.key]
        if self.by_user[tenant] >= max(1, USER_FACTOR * num_free) or num_free <= 0:
            raise OverloadedError(
                f"{self.by_user[tenant] if num_free > 0 else self.by_key[tenant.key]} requests of yours are "
                "in flight already: try again in a moment"
            )
        self.by_key[tenant.key] += 1
        self.by_user[tenant] += 1

    def remove(self, tenant: Tenant) -> None:
        for counter, name in ((self.by_key, tenant.key), (self.by_user, tenant)):
            counter[name] -= 1  # type: ignore[index]
            if counter[name] <= 0:  # type: ignore[index]
                del counter[name]  # type: ignore[attr-defined]


class EngineThread:
    """Runs an engine in a thread of its own.

    At most `max_requests` of each API key are in flight, and `max_prompts` that generate nothing; `on_events`
    gets all events of a step at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int = 1024,
        max_prompts: int = 4096,
        on_events: Callable[[Events], None] = deliver,
    ) -> None:
        self.engine = engine
        self.generation_quota = Quota(max_requests)
        self.prompt_quota = Quota(max_prompts)
        self.on_events = on_events
        self.condition = threading.Condition()
        self.incoming: deque[RequestHandle] = deque()
        self.in_flight: set[RequestHandle] = set()
        self.closed = False  # accepts no more requests
        self.stopped = False  # the thread ends
        self.ended = False  # it has ended: the engine is nobody's
        self.busy_since: float | None = None  # time.monotonic() at the start of its step; None while it waits
        self.failures = 0
        self.num_steps = 0
        self.step_seconds = 0.0
        self.status_futures: list[Future[EngineStatus]] = []
        self.status = self._read_status()  # the last one that was asked for
        self.thread = threading.Thread(target=self._run, name="keepleft engine", daemon=True)
        self.thread.start()

    def submit(
        self, request: Request, on_event: Callable[[Event], None] = lambda event: None
    ) -> RequestHandle:
        """Queue a request.

        Raises ValueError if it can never be served, OverloadedError if its tenant has too many in flight,
        ShuttingDownError if the engine is shutting down.
        """
        self.engine.validate(request)
        handle = RequestHandle(request, on_event)
        with self.condition:
            if self.closed:
                raise ShuttingDownError()
            self._quota(request).add(request.tenant)
            self.in_flight.add(handle)
            self.incoming.append(handle)
            self.condition.notify()
        return handle

    def _quota(self, request: Request) -> Quota:
        return self.prompt_quota if isinstance(request, PromptRequest) else self.generation_quota

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request: the next step frees what it holds."""
        with self.condition:
            handle.cancelled = True
            self.condition.notify()

    def drain(self, seconds: float) -> bool:
        """Accept no more requests, give those in flight `seconds` to finish, and cancel the rest.

        The thread then ends. Returns whether all requests could finish.
        """
        with self.condition:
            self.closed = True
            self.condition.notify()
            all_finished = self.condition.wait_for(lambda: not self.in_flight, max(0.0, seconds))
            for handle in self.in_flight:
                handle.cancelled = True
            self.condition.notify()
            self.condition.wait_for(lambda: not self.in_flight, STOP_SECONDS)
            self.stopped = True
            self.condition.notify()
        self.thread.join(STOP_SECONDS)
        return all_finished

    @property
    def has_failed(self) -> bool:
        """The thread has ended, and nobody had asked it to."""
        return self.ended and not self.stopped

    @property
    def seconds_in_step(self) -> float:
        """How long the step has taken that the thread is in; 0 while it waits for work."""
        busy_since = self.busy_since
        return 0.0 if busy_since is None or self.ended else time.monotonic() - busy_since

    def request_status(self) -> Future[EngineStatus]:
        """What the engine is doing. It is read in the engine's thread between two steps, once for all who
        ask, and while the engine is busy at most every `STATUS_INTERVAL_SECONDS`.
        """
        future: Future[EngineStatus] = Future()
        with self.condition:
            if self.ended:
                future.set_result(self._read_status())
            else:
                self.status_futures.append(future)
                self.condition.notify_all()
        return future

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        finally:
            with self.condition:
                self.ended = True
            self._answer_status(is_urgent=True)

    def _run_once(self) -> bool:
        """Wait for work and do a step of it; False at the end."""
        with self.condition:
            self.condition.wait_for(
                lambda: self.incoming or self.engine.busy or self.stopped or self.status_futures
            )
            if self.stopped:
                return False
            incoming = self.incoming
            self.incoming = deque()
        self.busy_since = time.monotonic()
        for handle in incoming:
            self.engine.submit(handle)
        if self.engine.busy:
            self._publish(self._step())
        self._answer_status(is_urgent=not self.engine.busy)
        self.busy_since = None
        with self.condition:
            self.condition.notify_all()
        return True

    def _answer_status(self, *, is_urgent: bool) -> None:
        if not self.status_futures:
            return
        if not is_urgent and time.monotonic() - self.status.taken_at < STATUS_INTERVAL_SECONDS:
            return
        with self.condition:
            futures = self.status_futures
            self.status_futures = []
        waiting = [future for future in futures if future.set_running_or_notify_cancel()]
        try:
            self.status = self._read_status()
        except Exception as error:  # a bug here must not end the thread
            for future in waiting:
                future.set_exception(error)
        else:
            for future in waiting:
                future.set_result(self.status)

    def _read_status(self) -> EngineStatus:
        """For the engine's thread, or where it does not run."""
        with self.condition:
            in_flight = self.generation_quota.by_key + self.prompt_quota.by_key
        totals = {
            **self.engine.stats(),
            "in_flight": in_flight.total(),
            "failures": self.failures,
            "steps": self.num_steps,
            "step_seconds": self.step_seconds,
        }
        return EngineStatus(
            taken_at=time.monotonic(),
            totals=totals,
            activity=self.engine.activity(),
            in_flight=in_flight,
            prompt_tokens=dict(self.engine.prompt_tokens),
            generation_tokens=dict(self.engine.generation_tokens),
        )

    def _step(self) -> Events:
        start = time.perf_counter()
        try:
            return self.engine.step()
        except Exception as error:  # fails all its requests, but not the server
            self.failures += 1
            with self.condition:  # those that came during the step are not in the engine yet, and are kept
                handles = list(self.in_flight.difference(self.incoming))
            self.engine.clear()
            message = f"the model could not go on: {type(error).__name__}"
            return [(handle, FinishEvent(0, "failed", message=message, last=True)) for handle in handles]
        finally:
            self.num_steps += 1
            self.step_seconds += time.perf_counter() - start

    def _publish(self, events: Events) -> None:
        finished = [handle for handle, event in events if isinstance(event, FinishEvent) and event.last]
        # Before the events: whoever has an answer finds its request neither in flight nor counted.
        if finished:
            with self.condition:
                self.in_flight.difference_update(finished)
                for handle in finished:
                    self._quota(handle.request).remove(handle.request.tenant)
        if events:
            self.on_events(events)


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
