"""The fork server: a process with the model and a single thread, which forks workers when asked.

The server forks it before it starts any threads, so it shares the weights (copy-on-write), and a worker takes
milliseconds to start and no memory for them. A process that has used CUDA cannot be forked: then the fork
server is started as `python -m keepleft.serving.http.explorer_process.fork_server`, and loads the model on
the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import warnings
from typing import NoReturn

from keepleft.serving.http.explorer_process.tasks import Tasks
from keepleft.serving.http.explorer_process.worker import (
    ModelSource,
    limit_memory,
    load_tasks,
    lower_priority,
    serve_requests,
)

MAX_MESSAGE_BYTES = 1 << 16


def fork() -> int:
    """os.fork, without Python's warning about threads: none of ours runs, and those of BLAS are idle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def run_fork_server(control: socket.socket, tasks: Tasks) -> NoReturn:
    """Fork and kill workers as the messages on `control` say; at its end kill them all, and exit.

    {"memory": bytes} with a socket forks a worker that talks over it, and may use so much; {"kill": pid}
    kills one. The reply is {"pid": pid}.
    """
    gc.freeze()  # the collector would write to every object, which copies its page
    close_inherited_files(keep=control.fileno())
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: it is the server that drains
        signal.signal(number, signal.SIG_IGN)
    workers: set[int] = set()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        except OSError:
            message = b""
        if not message:
            break
        order = json.loads(message)
        pid = order.get("kill", 0)
        if not pid:
            pid = _fork_worker(control, descriptors[0], tasks, order["memory"])
            workers.add(pid)
        elif pid in workers:  # its number is not used again before it is waited for
            workers.remove(pid)
            _kill(pid)
        control.send(json.dumps({"pid": pid}).encode())
    for pid in workers:
        _kill(pid)
    os._exit(0)


def close_inherited_files(keep: int) -> None:
    """Close what a fork has inherited, so that no socket stays open because of it."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != keep:
            try:
                os.close(descriptor)
            except OSError:  # the one of the listing itself
                continue


def _fork_worker(control: socket.socket, descriptor: int, tasks: Tasks, memory: int) -> int:
    pid = fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        lower_priority()
        limit_memory(memory)
        with os.fdopen(descriptor, "rb", closefd=False) as reader, os.fdopen(descriptor, "wb") as writer:
            serve_requests(tasks, reader, writer)
    finally:
        os._exit(1)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    message = control.recv(MAX_MESSAGE_BYTES)
    if not message:
        os._exit(0)
    run_fork_server(control, load_tasks(ModelSource(**json.loads(message))))


if __name__ == "__main__":
    main()
