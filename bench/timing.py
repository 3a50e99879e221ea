"""Two ways of doing one thing, timed in turn in one process: medians, and the quickest of both, after a
warm-up.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

Work = Callable[[], Any]


class Race(NamedTuple):
    ours: float  # seconds for one call
    theirs: float
    ratio: float  # the median over neighbours in time: what slows the machine down slows both
    quickest: (
        float  # our quickest sample over theirs: what is left when the machine is busy with other things
    )
    busy: float  # median over minimum: far above 1, the machine was busy with other things


def race(
    ours: Work,
    theirs: Work,
    *,
    seconds: float = 2.0,
    sample: float = 0.002,
    warm: int = 3,
    device: str = "cpu",
) -> Race:
    """Time both in turn, each first as often as the other, for about so many seconds; one sample is many
    short calls.
    """
    for _ in range(warm):
        ours(), theirs()
    once = max(1e-9, timed(theirs, warm, device))
    calls = max(1, round(sample / once))
    pairs = min(400, max(7, round(seconds / (2 * calls * once))))
    tried: list[tuple[float, float]] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(pairs):
            if turn % 2:
                second = timed(theirs, calls, device)
                tried.append((timed(ours, calls, device), second))
            else:
                first = timed(ours, calls, device)
                tried.append((first, timed(theirs, calls, device)))
    finally:
        if collecting:
            gc.enable()
    mine, other = zip(*tried, strict=True)
    return Race(
        statistics.median(mine),
        statistics.median(other),
        statistics.median(a / b for a, b in tried),
        min(mine) / min(other),
        statistics.median(other) / min(other),
    )


def timed(work: Work, calls: int, device: str = "cpu") -> float:
    """Seconds for one call: by the device's own clock on a GPU, by the wall's elsewhere."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    begin_at = perf_counter()
    for _ in range(calls):
        work()
    return (perf_counter() - begin_at) / calls


def waited(work: Work, times: int = 5, device: str = "cpu") -> float:
    """Median seconds until one call is done, the host's share included."""

    def once() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - begin

    once()
    return statistics.median(once() for _ in range(times))
