"""An engine in a thread of its own: requests from anywhere, errands between its steps, and an orderly end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from keepleft.serving.asks import Ask, ClosedError, End, Engine, Event, FullError, Heard, Ticket

Result = TypeVar("Result")


def handed_out(heard: Heard) -> None:
    """Every event to whoever waits for it."""
    for ticket, event in heard:
        ticket.hear(event)


class Running:
    """`most` requests may be on their way and `errands` wait; `deliver` gets what each step has to tell, all at once."""

    def __init__(self, engine: Engine, *, most: int = 1024, errands: int = 64,
                 deliver: Callable[[Heard], None] = handed_out) -> None:
        self.engine, self.most, self.most_errands, self.deliver = engine, most, errands, deliver
        self.change = threading.Condition()
        self.fresh: deque[Ticket] = deque()
        self.errands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.open: set[Ticket] = set()
        self.closed = self.stopped = False
        self.failed = 0
        self.thread = threading.Thread(target=self._run, name="keepleft engine", daemon=True)
        self.thread.start()

    def submit(self, ask: Ask, hear: Callable[[Event], None] = lambda event: None) -> Ticket:
        """A request on its way, or an error: ValueError (never), FullError (not now), ClosedError (no more)."""
        self.engine.look(ask)
        ticket = Ticket(ask, hear)
        with self.change:
            if self.closed:
                raise ClosedError("the server is shutting down: ask another one")
            if len(self.open) >= self.most:
                raise FullError(f"{self.most} requests are on their way already: try again in a moment")
            self.open.add(ticket)
            self.fresh.append(ticket)
            self.change.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: what it holds is free with the next step."""
        with self.change:
            ticket.dropped = True
            self.change.notify()

    def errand(self, work: Callable[[], Result]) -> Future[Result]:
        """Something else to do with the model, between two steps."""
        future: Future[Result] = Future()
        with self.change:
            if self.closed:
                raise ClosedError("the server is shutting down: ask another one")
            if len(self.errands) >= self.most_errands:
                raise FullError(f"{self.most_errands} questions wait already: try again in a moment")
            self.errands.append((work, future))
            self.change.notify()
        return future

    def drain(self, seconds: float) -> bool:
        """No more requests; those on their way may end, for so long. The rest is cancelled. Were all able to end?"""
        with self.change:
            self.closed = True
            self.change.notify()
        deadline = time.monotonic() + seconds
        with self.change:
            fine = self.change.wait_for(lambda: not self.open and not self.errands, max(0.0, deadline - time.monotonic()))
            for ticket in self.open:
                ticket.dropped = True
            self.change.notify()
            self.change.wait_for(lambda: not self.open, 10.0)
            self.stopped = True
            self.change.notify()
        self.thread.join(10.0)
        return fine

    def counts(self) -> dict[str, float]:
        with self.change:
            return {**self.engine.counts(), "open": len(self.open), "errands": len(self.errands), "failed": self.failed}

    def _run(self) -> None:
        while True:
            with self.change:
                self.change.wait_for(lambda: self.fresh or self.errands or self.engine.busy or self.stopped)
                if self.stopped:
                    break
                fresh, self.fresh = self.fresh, deque()
                errand = self.errands.popleft() if self.errands else None
            for ticket in fresh:
                self.engine.take(ticket)
            if errand is not None:
                _done(*errand)
            if self.engine.busy:
                self._told(self._step())
            with self.change:
                self.change.notify_all()
        for _, future in self.errands:
            future.cancel()

    def _step(self) -> Heard:
        try:
            return self.engine.step()
        except Exception as error:  # an engine that fails as a whole takes its requests along, but not the server
            self.failed += 1
            lost = list(self.open)
            self.engine.clear()
            return [(ticket, End(0, "failed", message=f"the model could not go on: {type(error).__name__}", last=True))
                    for ticket in lost]

    def _told(self, heard: Heard) -> None:
        over = [ticket for ticket, event in heard if isinstance(event, End) and event.last]
        if heard:
            self.deliver(heard)
        if over:
            with self.change:
                self.open.difference_update(over)


def _done(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # whoever waits for it gets it
        future.set_exception(error)
