"""A tracker in a thread of its own: what it does, and what it fails to do, never holds training up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

from keepleft.runs.trackers import TrackedRun, Tracker

MAX_WAITING = 1000  # reports that wait for a slow tracker


class BackgroundTracker:
    """Passes calls on to a tracker, in order, in a thread.

    After its first error the tracker is left alone, and `take_notes` says why. A tracker that falls behind by
    MAX_WAITING reports misses further ones until it catches up.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.tracker = tracker
        self.name = name
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.notes: SimpleQueue[str] = SimpleQueue()
        self.num_missed = 0
        self.has_failed = False
        self.thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def start(self, run: TrackedRun) -> str | None:
        def start_tracker() -> None:
            if place := self.tracker.start(run):
                self.notes.put(f"tracking with {self.name}: {place}")

        self.calls.put(start_tracker)
        return None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.calls.qsize() >= MAX_WAITING:
            self.num_missed += 1
            return
        self.calls.put(lambda: self.tracker.log(step, metrics))

    def finish(self, completed: bool) -> None:
        self.calls.put(lambda: self.tracker.finish(completed))
        self.calls.put(None)

    def wait(self, seconds: float) -> None:
        """After `finish`, wait until the tracker is done, but no longer than this."""
        self.thread.join(max(0.0, seconds))
        if self.thread.is_alive():
            self.notes.put(
                f"{self.name} does not answer, and is left to itself: metrics.jsonl has all metrics"
            )
        elif self.num_missed:
            self.notes.put(
                f"{self.name} was too slow for {self.num_missed:,} reports: metrics.jsonl has them"
            )

    def take_notes(self) -> list[str]:
        """What there is to say since the last call."""
        return [self.notes.get() for _ in range(self.notes.qsize())]

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            if self.has_failed:
                continue
            try:
                call()
            except BaseException as error:  # whatever the program does: its thread ends here, not the run
                self.has_failed = True
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                self.notes.put(
                    f"{self.name} failed and is left out; metrics.jsonl has all metrics ({reason})"
                )
