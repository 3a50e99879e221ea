"""Writes the log in a thread of its own: a reader that does not read never stops the server."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

MAX_LINES = 4096  # that wait to be written; more are dropped
CLOSE_SECONDS = 2.0  # for the last lines


class LogWriter:
    """`write` may block or raise OSError; `describe_dropped` makes the line that says how many were lost."""

    def __init__(
        self,
        write: Callable[[str], None],
        describe_dropped: Callable[[int], str],
        *,
        max_lines: int = MAX_LINES,
    ) -> None:
        self._write = write
        self.describe_dropped = describe_dropped
        self.lines: queue.Queue[str | None] = queue.Queue(max_lines)  # None: the end
        self.lock = threading.Lock()
        self.num_dropped = 0  # since the last line that was written
        self.thread = threading.Thread(target=self._run, name="keepleft log", daemon=True)
        self.thread.start()

    def write(self, line: str) -> None:
        """Write a line soon, or drop it where too many wait. Never blocks."""
        try:
            self.lines.put_nowait(line)
        except queue.Full:
            self._count_dropped(1)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for at most so many seconds."""
        try:
            self.lines.put(None, timeout=seconds)
        except queue.Full:  # nobody reads
            return
        self.thread.join(seconds)

    def _count_dropped(self, num_lines: int) -> None:
        with self.lock:
            self.num_dropped += num_lines

    def _run(self) -> None:
        while (line := self.lines.get()) is not None:
            if not self._try_to_write(line):
                self._count_dropped(1)
                continue
            with self.lock:
                num_dropped = self.num_dropped
                self.num_dropped = 0
            if num_dropped and not self._try_to_write(self.describe_dropped(num_dropped)):
                self._count_dropped(num_dropped)

    def _try_to_write(self, line: str) -> bool:
        try:
            self._write(line)
        except OSError:  # the reader is gone, or the disk is full
            return False
        return True


def write_to_descriptor(descriptor: int, line: str) -> None:
    """Write all of it, without Python's file objects: the exit would wait for a thread that holds one."""
    data = line.encode(errors="replace")
    while data:
        data = data[os.write(descriptor, data) :]
