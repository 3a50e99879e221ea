"""The server's end of the explorer's processes: workers for questions and attention maps, one for audits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from keepleft.models.transformer import Model
from keepleft.serving.http.explorer_process.tasks import TaskName, Tasks
from keepleft.serving.http.explorer_process.worker import ModelSource
from keepleft.serving.http.explorer_process.worker_queue import WorkerQueue
from keepleft.serving.http.explorer_process.worker_source import ForkServer, SpawnedWorkers, WorkerSource

GRACE_SECONDS = 0.25  # for a worker to finish what nobody waits for: what it has cached is worth keeping
MAX_WORKERS = 4  # that answer questions: as many API keys never wait for each other
HOLD_SECONDS = 5.0  # that a question may hold a worker while another key waits for one
QUESTION_MEMORY = 2 << 30  # bytes that a worker may use beside the model
AUDIT_MEMORY = 8 << 30  # an audit copies the model
AUDIT_GRACE_SECONDS = 60.0  # an audit goes on in the background when its caller has left


class ExplorerProcess:
    """Answers beside the engine. `max_waiting`: tasks of one API key."""

    def __init__(self, source: WorkerSource, *, max_waiting: int) -> None:
        self.source = source
        self.queue = WorkerQueue(
            partial(source.start_worker, QUESTION_MEMORY),
            max_waiting=max_waiting,
            grace_seconds=GRACE_SECONDS,
            max_workers=MAX_WORKERS if source.shares_weights else 1,
            hold_seconds=HOLD_SECONDS,
        )
        self.audit_queue = WorkerQueue(
            partial(source.start_worker, AUDIT_MEMORY),
            max_waiting=max_waiting,
            grace_seconds=AUDIT_GRACE_SECONDS,
        )

    async def run(self, task: TaskName, params: Mapping[str, Any], key: str) -> bytes:
        """The answer as JSON. When the caller is cancelled, so is its task.

        Raises OverloadedError, ShuttingDownError, or APIError.
        """
        is_audit = task == "question" and params["question"] == "audit"
        queue = self.audit_queue if is_audit else self.queue
        return await asyncio.wrap_future(queue.submit(key, task, params))

    def drain(self, seconds: float) -> bool:
        """Wait for what runs or waits, at most this long, but not for an audit. Blocks."""
        return self.queue.drain(seconds)

    def close(self) -> None:
        """Kill all processes."""
        self.queue.close()
        self.audit_queue.close()
        self.source.close()
        self.queue.join()
        self.audit_queue.join()


def start_workers(model: Model, tasks: Tasks, source: ModelSource, *, can_fork: bool = True) -> WorkerSource:
    """Where the workers of a served model come from.

    `can_fork`: no other thread has been started yet, so that a fork of this process can work.

    A process that uses a GPU cannot be forked, and macOS and Windows fork badly or not at all: there the
    model is loaded a second time, on the CPU, with the first question.
    """
    if sys.platform != "linux":
        return SpawnedWorkers(source)
    if not can_fork or next(model.parameters()).device.type != "cpu" or torch.cuda.is_initialized():
        return ForkServer(source)
    return ForkServer.fork(tasks, source)
