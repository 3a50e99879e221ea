"""Where workers come from: a fork server, or processes that load the model themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess  # nosec B404 # its only commands are this Python with modules of ours
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Protocol

from keepleft.serving.http.explorer_process import fork_server, worker
from keepleft.serving.http.explorer_process.fork_server import MAX_MESSAGE_BYTES, fork, run_fork_server
from keepleft.serving.http.explorer_process.frames import read_frame, write_frame
from keepleft.serving.http.explorer_process.tasks import Tasks
from keepleft.serving.http.explorer_process.worker import ModelSource

EXIT_SECONDS = 5.0  # for a process to exit by itself
POLL_SECONDS = 0.01


class WorkerDiedError(RuntimeError):
    """The worker, or the process it is forked from, has ended."""


class Worker:
    """The server's end of one worker process. `ask` blocks; `kill` may be called from any thread."""

    def __init__(
        self,
        reader: IO[bytes],
        writer: IO[bytes],
        *,
        is_alive: Callable[[], bool],
        kill: Callable[[], None],
        close: Callable[[], object],
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.is_alive = is_alive  # while it is idle
        self.kill = kill
        self._close = close

    def ask(self, request: bytes) -> bytes:
        """The answer. Raises WorkerDiedError if the worker ends before."""
        try:
            write_frame(self.writer, request)
            answer = read_frame(self.reader)
        except OSError:
            answer = None
        if not answer:
            raise WorkerDiedError
        return answer

    def close(self) -> None:
        """Kill the process and close the files; only by the thread that asks."""
        self.kill()
        for file in (self.reader, self.writer):
            with suppress(OSError):  # what was not sent is lost
                file.close()
        self._close()


class WorkerSource(Protocol):
    shares_weights: bool  # a further worker takes no memory for them

    def start_worker(self, memory: int) -> Worker:
        """A new worker, which may use so many bytes beside the model.

        Blocks, while the model is loaded where it has to be.
        """
        ...

    def close(self) -> None: ...


class ForkServer:
    """The server's end of the fork server. If it is not there or has died, `source` says what to load."""

    shares_weights = True

    def __init__(self, source: ModelSource | None = None) -> None:
        self.source = source
        self.lock = threading.Lock()
        self.control: socket.socket | None = None
        self.process: ForkedProcess | subprocess.Popen[bytes] | None = None

    @classmethod
    def fork(cls, tasks: Tasks, source: ModelSource | None = None) -> ForkServer:
        """Fork this process, which must have no other threads that hold locks, and not have used CUDA."""
        server = cls(source)
        server.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = fork()
        if not pid:
            try:
                run_fork_server(theirs, tasks)
            finally:
                os._exit(1)
        theirs.close()
        server.process = ForkedProcess(pid)
        return server

    def start_worker(self, memory: int) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                try:
                    pid = self._call({"memory": memory}, theirs)
                except WorkerDiedError:  # the fork server has died: start another one
                    pid = self._call({"memory": memory}, theirs)
            except BaseException:
                ours.close()
                raise

        def is_alive() -> bool:
            try:
                return bool(ours.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                return True
            except OSError:
                return False

        def kill() -> None:
            with suppress(WorkerDiedError):
                self._call({"kill": pid})
            with suppress(OSError):  # without its fork server a worker ends when its connection does
                ours.shutdown(socket.SHUT_RDWR)

        reader, writer = ours.makefile("rb"), ours.makefile("wb")
        return Worker(reader, writer, is_alive=is_alive, kill=kill, close=ours.close)

    def close(self) -> None:
        self.source = None
        control = self.control
        if control is not None:
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        with self.lock:
            self._stop()

    def _call(self, message: dict[str, int], descriptor: socket.socket | None = None) -> int:
        """The pid in the reply. Raises WorkerDiedError."""
        with self.lock:
            if self.control is None:
                if descriptor is None or self.source is None:
                    raise WorkerDiedError
                self._spawn(self.source)
            assert self.control is not None
            try:
                descriptors = [] if descriptor is None else [descriptor.fileno()]
                socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)
                reply = self.control.recv(MAX_MESSAGE_BYTES)
            except OSError:
                reply = b""
            if not reply:
                self._stop()
                raise WorkerDiedError
            return int(json.loads(reply)["pid"])

    def _spawn(self, source: ModelSource) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(  # nosec B603 # no shell, and nothing of a request is in it
                [sys.executable, "-m", fork_server.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.control.send(json.dumps(asdict(source)).encode())

    def _stop(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None
        if self.process is not None:
            try:
                self.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


class ForkedProcess:
    """A forked child with the methods of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class SpawnedWorkers:
    """Workers that load the model themselves, for systems where processes are not forked."""

    shares_weights = False

    def __init__(self, source: ModelSource) -> None:
        self.source = source

    def start_worker(self, memory: int) -> Worker:
        process = subprocess.Popen(  # nosec B603 # no shell, and nothing of a request is in it
            [sys.executable, "-m", worker.__name__, str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        spawned = Worker(
            process.stdout,
            process.stdin,
            is_alive=lambda: process.poll() is None,
            kill=process.kill,
            close=process.wait,
        )
        try:
            spawned.ask(json.dumps(asdict(self.source)).encode())  # it answers when it has loaded the model
        except BaseException:
            spawned.close()
            raise
        return spawned

    def close(self) -> None:
        pass
