"""The queue in front of one worker: bounded, fair between API keys, and rid of callers that have left."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keepleft.serving.engine.request import OverloadedError, ShuttingDownError
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.explorer_process.worker import OK
from keepleft.serving.http.explorer_process.worker_source import Worker, WorkerDiedError

MAX_WAITING = 128  # of all keys
STOP_SECONDS = 5.0  # for the thread to end


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


class WorkerQueue:
    """Hands tasks to a worker one at a time, in a thread of its own.

    The key whose last turn is longest ago is next, its tasks in order of arrival. When a caller cancels the
    future of a running task, the worker has `grace_seconds` to finish, and is then killed; the next task
    starts another. At most `max_waiting` tasks of one key wait.
    """

    def __init__(self, start_worker: Callable[[], Worker], *, max_waiting: int, grace_seconds: float) -> None:
        self.start_worker = start_worker
        self.max_waiting = max_waiting
        self.grace_seconds = grace_seconds
        self.condition = threading.Condition()
        self.waiting: dict[str, deque[QueuedTask]] = {}
        self.turns: dict[str, int] = {}  # the number of each key's last turn
        self.num_turns = 0
        self.running: QueuedTask | None = None
        self.worker: Worker | None = None
        self.thread: threading.Thread | None = None
        self.closed = False

    def submit(self, key: str, name: str, params: Mapping[str, Any]) -> Future[bytes]:
        """The answer as JSON, which may be cancelled at any time.

        Raises OverloadedError if too many tasks wait, ShuttingDownError after `close`.
        """
        task = QueuedTask(key, name, params)
        with self.condition:
            if self.closed:
                raise ShuttingDownError("the server is shutting down: ask another one")
            num_waiting = len(self.waiting.get(key, ()))
            if num_waiting >= self.max_waiting or sum(map(len, self.waiting.values())) >= MAX_WAITING:
                raise OverloadedError(f"{num_waiting} questions of yours wait already: try again in a moment")
            self.waiting.setdefault(key, deque()).append(task)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="keepleft explorer", daemon=True)
                self.thread.start()
            self.condition.notify_all()
        task.future.add_done_callback(partial(self._on_done, task))
        return task.future

    def counts(self) -> tuple[int, int]:
        """How many tasks run and how many wait."""
        with self.condition:
            return int(self.running is not None), sum(map(len, self.waiting.values()))

    def drain(self, seconds: float) -> bool:
        """Wait until nothing runs or waits, at most this long. Blocks: call it in a thread."""
        with self.condition:
            return self.condition.wait_for(lambda: not self.waiting and self.running is None, seconds)

    def close(self) -> None:
        """Take no more tasks, fail those that run or wait, and kill the worker."""
        with self.condition:
            self.closed = True
            tasks = [task for queue in self.waiting.values() for task in queue]
            self.waiting.clear()
            if self.running is not None:
                tasks.append(self.running)
                if self.worker is not None:
                    self.worker.kill()
            self.condition.notify_all()
        for task in tasks:
            with suppress(InvalidStateError):
                task.future.set_exception(ShuttingDownError("the server is shutting down: ask another one"))

    def join(self) -> None:
        """Wait for the thread to end after `close`."""
        if self.thread is not None:
            self.thread.join(STOP_SECONDS)

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
            elif self.running is task:
                timer = threading.Timer(self.grace_seconds, self._kill_worker, [task])
                timer.daemon = True
                timer.start()

    def _kill_worker(self, task: QueuedTask) -> None:
        with self.condition:  # so that the next task does not start meanwhile
            if self.running is task and self.worker is not None:
                self.worker.kill()

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            try:
                answer = self._ask(task)
                with suppress(InvalidStateError):  # the caller has left
                    task.future.set_result(answer)
            except Exception as error:
                with suppress(InvalidStateError):
                    task.future.set_exception(error)
            with self.condition:
                self.running = None
                self.condition.notify_all()
        self._discard_worker()

    def _next_task(self) -> QueuedTask | None:
        """Wait for a task; None when the queue is closed."""
        with self.condition:
            self.condition.wait_for(lambda: self.waiting or self.closed)
            if self.closed:
                return None
            key = min(self.waiting, key=lambda name: self.turns.get(name, -1))
            self.num_turns += 1
            self.turns[key] = self.num_turns
            task = self.waiting[key].popleft()
            if not self.waiting[key]:
                del self.waiting[key]
            self.running = task
            return task

    def _ask(self, task: QueuedTask) -> bytes:
        if self.worker is not None and not self.worker.is_alive():
            self._discard_worker()
        try:
            worker = self.worker or self.start_worker()
            with self.condition:
                self.worker = worker
                if self.closed or task.future.cancelled():
                    return b""
            answer = worker.ask(json.dumps({"task": task.name, "params": task.params}).encode())
        except WorkerDiedError:
            self._discard_worker()
            raise APIError(
                500,
                "the process that answers this ended before it had the answer: ask again, or for less",
                code="model_failed",
            ) from None
        if answer[:1] == OK:
            return answer[1:]
        error = json.loads(answer[1:])
        if "bug" in error:
            raise WorkerError(f"{error['bug']}: {error['message']}", [error["bug"], *error["where"]])
        raise APIError(error["status"], error["message"], param=error["param"], code=error["code"])

    def _discard_worker(self) -> None:
        with self.condition:
            worker = self.worker
            self.worker = None
        if worker is not None:
            worker.close()
