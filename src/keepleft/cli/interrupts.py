"""Ctrl-C while a library is being imported, which now and then swallows it."""

from __future__ import annotations

import signal
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RETRY_SECONDS = 0.3
IMPORT_FILE = "<frozen importlib._bootstrap>"  # the code of an import statement


@contextmanager
def repeat_lost_interrupts() -> Iterator[None]:
    """Repeat a Ctrl-C that comes during an import until it ends what is below.

    Importing PyTorch takes seconds, and some of its code takes a KeyboardInterrupt for an error of its own
    and goes on: in C++, where an attribute is looked up, or around an optional package.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever calls has a way of their own
        return
    timers: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_in_import(frame):
            timer = threading.Timer(RETRY_SECONDS, _interrupt_main_thread)
            timer.daemon = True
            timer.start()
            timers.append(timer)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        if signal.getsignal(signal.SIGINT) is handle:  # a command may have put its own in place
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):  # it also wakes a thread that waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        interrupt_main()


def _is_in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_FILE:
            return True
        frame = frame.f_back
    return False
