"""Processes of Ray that a test looks for, waits for and kills."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from keepleft.cluster.memory import descendants

WAIT_SECONDS = 120.0


def wait_until(condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def title(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def processes_called(mark: str, root: int) -> list[int]:
    """The processes below another one with this in their title."""
    return [process for process in descendants(root) if mark in title(process)]


def start_keepleft(*arguments: object, own_group: bool = False, **environment: str) -> subprocess.Popen:
    """`own_group`: a process group, which a signal can be sent to."""
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "keepleft", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
    )
