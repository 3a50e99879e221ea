"""The peak memory of a piece of work, in bytes beyond what was in use before it (Linux, or a CUDA device)."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_rss(work: Callable[[], Any]) -> int:
    """Resident memory of this process.

    getrusage's maximum would not do: it never falls, and a child starts with its parent's.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to what is resident now
    before = status_bytes("VmRSS")
    result = work()
    peak = status_bytes("VmHWM") - before
    del result
    return peak


def peak_cuda_memory(work: Callable[[], Any]) -> int:
    """Tensors on the current CUDA device."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def status_bytes(field: str, pid: int | str = "self") -> int:
    """A field of /proc/PID/status, such as VmRSS (resident now) or VmHWM (its peak), in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def run_child(file: str, *arguments: str) -> Any:
    """What `python file arguments…` prints last, as JSON. A new process has no memory left over."""
    done = subprocess.run([sys.executable, file, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(file).name} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
