"""The queue in front of the workers: bounded, fair between API keys, and rid of callers that have left."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from keepleft.serving.engine.request import OverloadedError, ShuttingDownError
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.explorer_process.worker import MODEL_FAILED, OK
from keepleft.serving.http.explorer_process.worker_source import Worker, WorkerDiedError

MAX_WAITING = 128  # of all keys
STOP_SECONDS = 5.0  # for the threads to end


class WorkerError(RuntimeError):
    """A bug of ours in the worker; `where` are its type and the lines of its traceback."""

    def __init__(self, message: str, where: list[str]) -> None:
        super().__init__(message)
        self.where = where


@dataclass(eq=False)
class QueuedTask:
    key: str  # the tenant's
    name: str
    params: Mapping[str, Any]
    future: Future[bytes] = field(default_factory=Future)


@dataclass(eq=False)
class WorkerSlot:
    """A place for a worker, with the thread that talks to it."""

    thread: threading.Thread | None = None
    worker: Worker | None = None
    key: str | None = None  # of the last task: what its worker has cached is worth keeping
    task: QueuedTask | None = None  # that it runs
    start_time: float | None = None  # of the task; None until its worker has started


class WorkerQueue:
    """Hands tasks to workers, at most `max_workers`, and one at a time of each key.

    The key whose last turn is longest ago is next, its tasks in order of arrival, and goes back to its worker
    if that is free. When a caller cancels the future of a running task, the worker has `grace_seconds` to
    finish, and is then killed; the next task starts another. While a key waits for a worker, the task that
    has run longest is ended once it has run for `hold_seconds`. At most `max_waiting` tasks of one key wait.
    """

    def __init__(
        self,
        start_worker: Callable[[], Worker],
        *,
        max_waiting: int,
        grace_seconds: float,
        max_workers: int = 1,
        hold_seconds: float = inf,
    ) -> None:
        self.start_worker = start_worker
        self.max_waiting = max_waiting
        self.grace_seconds = grace_seconds
        self.hold_seconds = hold_seconds
        self.condition = threading.Condition()
        self.waiting: dict[str, deque[QueuedTask]] = {}
        self.turns: dict[str, int] = {}  # the number of each key's last turn
        self.num_turns = 0
        self.slots = [WorkerSlot() for _ in range(max_workers)]
        self.hold_timer: threading.Timer | None = None  # runs while a key waits for a worker
        self.closed = False

    def submit(self, key: str, name: str, params: Mapping[str, Any]) -> Future[bytes]:
        """The answer as JSON, which may be cancelled at any time.

        Raises OverloadedError if too many tasks wait, ShuttingDownError after `close`.
        """
        task = QueuedTask(key, name, params)
        with self.condition:
            if self.closed:
                raise ShuttingDownError()
            num_waiting = len(self.waiting.get(key, ()))
            if num_waiting >= self.max_waiting or sum(map(len, self.waiting.values())) >= MAX_WAITING:
                raise OverloadedError(f"{num_waiting} questions of yours wait already: try again in a moment")
            self.waiting.setdefault(key, deque()).append(task)
            self._assign_tasks()
        task.future.add_done_callback(partial(self._on_done, task))
        return task.future

    def counts(self) -> tuple[int, int]:
        """How many tasks run and how many wait."""
        with self.condition:
            return len(self._busy_slots()), sum(map(len, self.waiting.values()))

    def drain(self, seconds: float) -> bool:
        """Wait until nothing runs or waits, at most this long. Blocks: call it in a thread."""
        with self.condition:
            return self.condition.wait_for(lambda: not self.waiting and not self._busy_slots(), seconds)

    def close(self) -> None:
        """Take no more tasks, fail those that run or wait, and kill the workers."""
        with self.condition:
            self.closed = True
            tasks = [task for queue in self.waiting.values() for task in queue]
            self.waiting.clear()
            for slot in self._busy_slots():
                assert slot.task is not None
                tasks.append(slot.task)
                if slot.worker is not None:
                    slot.worker.kill()
            if self.hold_timer is not None:
                self.hold_timer.cancel()
            self.condition.notify_all()
        for task in tasks:
            with suppress(InvalidStateError):
                task.future.set_exception(ShuttingDownError())

    def join(self) -> None:
        """Wait for the threads to end after `close`."""
        for slot in self.slots:
            if slot.thread is not None:
                slot.thread.join(STOP_SECONDS)

    # -- who is next; with the lock held

    def _busy_slots(self) -> list[WorkerSlot]:
        return [slot for slot in self.slots if slot.task is not None]

    def _ready_keys(self) -> list[str]:
        """Keys that wait and run nothing, in the order of their turns."""
        running = {slot.task.key for slot in self.slots if slot.task is not None}
        ready_keys = [key for key in self.waiting if key not in running]
        return sorted(ready_keys, key=lambda key: self.turns.get(key, -1))

    def _assign_tasks(self) -> None:
        """Give tasks to free workers, and bound the time of others where there are too few."""
        for key in self._ready_keys():
            free_slots = [slot for slot in self.slots if slot.task is None]
            if not free_slots:
                self._start_hold_timer(self.hold_seconds)
                break
            # its own, or one without a worker, or the one that was used longest ago
            last_turn = lambda slot: -1 if slot.key is None else self.turns[slot.key]
            own_slots = [slot for slot in free_slots if slot.key == key]
            self._assign_task(min(own_slots or free_slots, key=last_turn), key)
        self.condition.notify_all()

    def _assign_task(self, slot: WorkerSlot, key: str) -> None:
        self.num_turns += 1
        self.turns[key] = self.num_turns
        slot.task = self.waiting[key].popleft()
        slot.key = key
        slot.start_time = None
        if not self.waiting[key]:
            del self.waiting[key]
        if slot.thread is None:
            slot.thread = threading.Thread(
                target=self._run, args=(slot,), name="keepleft explorer", daemon=True
            )
            slot.thread.start()

    # -- tasks that are ended

    def _start_hold_timer(self, seconds: float) -> None:
        if self.hold_timer is None and not self.closed and seconds < inf:
            self.hold_timer = threading.Timer(seconds, self._end_longest_task)
            self.hold_timer.daemon = True
            self.hold_timer.start()

    def _end_longest_task(self) -> None:
        """If a key still waits for a worker, take it from the task that has held one longest."""
        with self.condition:
            self.hold_timer = None
            if not self._ready_keys() or len(self._busy_slots()) < len(self.slots):
                return
            now = time.monotonic()
            slot = min(self._busy_slots(), key=lambda slot: slot.start_time or now)
            seconds_left = (slot.start_time or now) + self.hold_seconds - now
            if seconds_left > 0:
                self._start_hold_timer(seconds_left)
                return
            assert slot.task is not None
            assert slot.worker is not None
            error = APIError(
                503,
                f"this took more than {self.hold_seconds:g} seconds while other API keys waited, and was "
                "ended: ask for less, or again in a moment",
                code="ended_for_others",
                headers={"retry-after": "5"},
            )
            with suppress(InvalidStateError):  # the caller has left
                slot.task.future.set_exception(error)
            slot.worker.kill()

    def _on_done(self, task: QueuedTask, future: Future[bytes]) -> None:
        """Forget a task whose caller has left."""
        if not future.cancelled():
            return
        with self.condition:
            queue = self.waiting.get(task.key, deque())
            if task in queue:
                queue.remove(task)
                if not queue:
                    del self.waiting[task.key]
                self.condition.notify_all()
            elif any(slot.task is task for slot in self.slots):
                timer = threading.Timer(self.grace_seconds, self._kill_worker, [task])
                timer.daemon = True
                timer.start()

    def _kill_worker(self, task: QueuedTask) -> None:
        with self.condition:  # so that the next task does not start meanwhile
            for slot in self.slots:
                if slot.task is task and slot.worker is not None:
                    slot.worker.kill()

    # -- the threads

    def _run(self, slot: WorkerSlot) -> None:
        while (task := self._next_task(slot)) is not None:
            try:
                answer = self._ask(slot, task)
                with suppress(InvalidStateError):  # the caller has left
                    task.future.set_result(answer)
            except Exception as error:
                with suppress(InvalidStateError):
                    task.future.set_exception(error)
            with self.condition:
                slot.task = None
                self._assign_tasks()
        self._discard_worker(slot)

    def _next_task(self, slot: WorkerSlot) -> QueuedTask | None:
        """Wait for a task; None when the queue is closed."""
        with self.condition:
            self.condition.wait_for(lambda: slot.task is not None or self.closed)
            return None if self.closed else slot.task

    def _ask(self, slot: WorkerSlot, task: QueuedTask) -> bytes:
        if slot.worker is not None and not slot.worker.is_alive():
            self._discard_worker(slot)
        try:
            worker = slot.worker or self.start_worker()
            with self.condition:
                slot.worker = worker
                slot.start_time = time.monotonic()
                if self.closed or task.future.cancelled():
                    return b""
            answer = worker.ask(json.dumps({"task": task.name, "params": task.params}).encode())
        except WorkerDiedError:
            self._discard_worker(slot)
            raise APIError(
                500,
                "the process that answers this ended before it had the answer: ask again, or for less",
                code=MODEL_FAILED,
            ) from None
        if answer[:1] == OK:
            return answer[1:]
        error = json.loads(answer[1:])
        if "bug" in error:
            raise WorkerError(f"{error['bug']}: {error['message']}", [error["bug"], *error["where"]])
        if error["code"] == MODEL_FAILED:  # with what it keeps, it might have too little memory again
            self._discard_worker(slot)
        raise APIError(error["status"], error["message"], param=error["param"], code=error["code"])

    def _discard_worker(self, slot: WorkerSlot) -> None:
        with self.condition:
            worker = slot.worker
            slot.worker = None
        if worker is not None:
            worker.close()
