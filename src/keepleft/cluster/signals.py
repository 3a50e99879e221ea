"""SIGTERM while a cluster runs: what it started is taken down, and the exit code is 143."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

REPEAT_SECONDS = 0.5
_last_signal = [-REPEAT_SECONDS]


class TerminatedError(KeyboardInterrupt):
    """SIGTERM has come: like Ctrl-C, with an exit code of its own."""

    exit_code = 128 + signal.SIGTERM


def is_repeated_signal() -> bool:
    """Is this the last signal once more? `timeout` and others send it to a process and to its group.

    To be called by each handler, once.
    """
    now = time.monotonic()
    is_repeated = now - _last_signal[0] < REPEAT_SECONDS
    _last_signal[0] = now
    return is_repeated


class SigtermHandler:
    """A context in which SIGTERM raises TerminatedError: from `begin_raising` on, since Ray would swallow the
    error while it starts. Signals reach the main thread only.
    """

    def __init__(self) -> None:
        self.is_main_thread = threading.current_thread() is threading.main_thread()
        self.has_come = False
        self.raises = False
        self.original: Any = None

    def __enter__(self) -> SigtermHandler:
        if self.is_main_thread:
            self.original = signal.signal(signal.SIGTERM, self._handle)
        return self

    def begin_raising(self) -> None:
        """Raise TerminatedError at once if SIGTERM has come already."""
        if self.is_main_thread:
            signal.signal(signal.SIGTERM, self._handle)  # code in C++ may have put its own in place
        self.raises = True
        if self.has_come:
            raise TerminatedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if not is_repeated_signal() and self.raises:
            raise TerminatedError

    def __exit__(self, *_: object) -> None:
        if self.is_main_thread:
            signal.signal(signal.SIGTERM, self.original)
