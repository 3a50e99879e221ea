"""CPU threads of a command: how many, and how they wait for each other.

Threads of OpenMP wait for each other several hundred times in a step of a model. GNU's runtime, which PyTorch
brings along on Linux, lets them spin for milliseconds by default. On cores that they share with another busy
process, the thread that is waited for has then often lost its core to one that only spins, and a step takes
three to ten times as long. A thousand spins, some microseconds, cost little on idle cores and end that
(bench/threads.py; the figures are in docs/sizing.md).
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 1_000
WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # whoever sets one of them has chosen
THREAD_VARIABLE = "OMP_NUM_THREADS"


def configure_threads(threads: int | None) -> None:
    """Let PyTorch use so many CPU threads. To be called before PyTorch is imported.

    None leaves the number to PyTorch, one per core, except where a container may use less. Raises ValueError
    for a number below 1.
    """
    from keepleft.cgroup import available_cores, cpu_quota

    if threads is not None and threads < 1:
        raise ValueError(f"--threads is {threads}: give at least one, or leave it out")
    if not any(name in os.environ for name in WAITING_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if threads is None and cpu_quota() is not None and THREAD_VARIABLE not in os.environ:
        threads = available_cores()
    if threads is None:
        return
    if "torch" in sys.modules:  # too late for the environment
        import torch

        torch.set_num_threads(threads)
    else:
        os.environ[THREAD_VARIABLE] = str(threads)
