"""The most memory a piece of work has held at once, in bytes beyond what was there before it (Linux, or a
CUDA device).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_of(work: Callable[[], Any]) -> int:
    """Of this process.

    getrusage's maximum would not do: it never falls, and a child begins with its parent's.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is held now
    before = _status("VmRSS")
    kept = work()
    peak = _status("VmHWM") - before
    del kept
    return peak


def peak_on_gpu(work: Callable[[], Any]) -> int:
    """Of the tensors on the current CUDA device."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def in_a_child(file: str, *words: str) -> Any:
    """What `python file words…` prints last, as JSON: a process of its own has no memory left over from
    others.
    """
    done = subprocess.run([sys.executable, file, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(file).name} {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _status(name: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024
