"""A worker process: reads requests and writes answers, one at a time, with one thread and low priority.

It is forked by the fork server. Where a process cannot be forked it is started as
`python -m keepleft.serving.http.explorer_process.worker`, and loads the model itself.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import torch

from keepleft.pipelines.loading import load_for_inference
from keepleft.serving.engine.thread import run_in_own_thread
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.http.errors import APIError, to_api_error
from keepleft.serving.http.explorer_process.frames import read_frame, write_frame
from keepleft.serving.http.explorer_process.tasks import Tasks, make_tasks, run_task
from keepleft.serving.http.middleware.request_log import stack_lines

NICENESS = 10  # a tenth of the CPU time of a process beside it: at 19, a busy machine would let it starve
FIRST_TO_BE_KILLED = "1000"  # where memory runs out: the worker, not the server
OK, ERROR = b"+", b"-"  # the first byte of an answer
READY = b"ready"
MODEL_FAILED = "model_failed"  # the code of the error where memory runs out, or the worker dies
MEMORY_ERRORS = ("can't allocate memory", "bad_alloc", "could not create a memory")  # of PyTorch and oneDNN


@dataclass(frozen=True)
class ModelSource:
    """What a process needs to load the served model itself."""

    path: str
    dtype: str
    name: str
    runs: str | None = None
    compare: str | None = None
    pivot: str | None = None


def load_tasks(source: ModelSource) -> Tasks:
    """The tasks over a model that this process loads, on the CPU."""
    loaded = run_in_own_thread(lambda: load_for_inference(source.path, dtype=source.dtype, device="cpu"))
    explorer = Explorer(
        *loaded, name=source.name, runs=source.runs, compare=source.compare, pivot=source.pivot
    )
    return make_tasks(loaded.model, explorer)


def lower_priority() -> None:
    """One thread, of low priority: the engine's steps take precedence."""
    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    try:
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_BE_KILLED)
    except OSError:  # not Linux
        return


def limit_memory(num_bytes: int) -> None:
    """Let this process use so much more than it has now; what needs more fails, and takes nobody else's."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:  # not Linux
        return
    import resource  # there is none on Windows

    (used_kilobytes,) = re.findall(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = 1024 * int(used_kilobytes) + num_bytes
    if hard_limit == resource.RLIM_INFINITY or limit < hard_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def serve_requests(tasks: Tasks, reader: IO[bytes], writer: IO[bytes]) -> NoReturn:
    """Answer requests until the server closes its end, then exit at once, even in the middle of one."""
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while (frame := read_frame(reader)) is not None:
            frames.put(frame)
        os._exit(0)

    torch.seed()  # the random numbers of a fork would be those of the one before
    threading.Thread(target=read, name="keepleft reading", daemon=True).start()
    while True:
        write_frame(writer, answer(tasks, frames.get()))


def answer(tasks: Tasks, frame: bytes) -> bytes:
    """`OK` and the result as JSON, or `ERROR` and the error."""
    request = json.loads(frame)
    try:
        return OK + run_task(tasks, request["task"], request["params"])
    except Exception as error:
        return ERROR + json.dumps(describe_error(error)).encode()


def describe_error(error: Exception) -> dict[str, object]:
    """The error response, or for a bug of ours its type and where it happened."""
    api_error = to_api_error(error)
    if is_out_of_memory(error):
        api_error = APIError(
            500,
            "this needs more memory than the process that answers it may use: give a shorter text, or ask "
            "for fewer beams or tokens",
            code=MODEL_FAILED,
        )
    if api_error is None:
        return {"bug": type(error).__name__, "message": str(error), "where": stack_lines(error)}
    return {
        "status": api_error.status,
        "message": api_error.message,
        "param": api_error.param,
        "code": api_error.code,
    }


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(reason in str(error) for reason in MEMORY_ERRORS)
    )


def main() -> NoReturn:
    reader = sys.stdin.buffer
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get between answers
    tasks = load_tasks(ModelSource(**json.loads(read_frame(reader) or b"{}")))
    lower_priority()
    limit_memory(int(sys.argv[1]))
    write_frame(writer, READY)
    serve_requests(tasks, reader, writer)


if __name__ == "__main__":
    main()
