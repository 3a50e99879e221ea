"""A process that a benchmark starts, and that never outlives it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STOP_SECONDS = 20.0  # to end by itself


@contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process (`options` are those of Popen); at the end terminate it, or kill it if it stays."""
    with subprocess.Popen(command, **options) as process:  # which also closes its pipes
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
