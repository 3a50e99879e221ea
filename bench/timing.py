"""Implementations timed in turns in one process, after a warm-up: medians, and the fastest samples."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch

Work = Callable[[], Any]
MIN_PAIRS, MAX_PAIRS = 7, 400


class Race(NamedTuple):
    keepleft: float  # median seconds per call
    peer: float
    ratio: float  # keepleft over peer, the median over neighbouring samples: a slow moment slows both
    min_ratio: float  # the fastest sample of keepleft over the peer's: little affected by other load
    noise: float  # median over minimum of the peer; far above 1, the machine was busy with other things


def race(
    keepleft: Work,
    peer: Work,
    *,
    seconds: float = 2.0,
    sample_seconds: float = 0.002,
    warmup: int = 3,
    device: str = "cpu",
) -> Race:
    """Time both in turns for about `seconds`. Each goes first in every other pair of samples.

    A sample is as many calls as fit into `sample_seconds`, at least one. With `seconds` 0, for a smoke run,
    both are called as rarely as possible.
    """
    if not seconds:
        sample_seconds, warmup = 0.0, 1
    for _ in range(warmup):
        keepleft(), peer()
    estimate = max(1e-9, seconds_per_call(peer, warmup, device))
    calls = max(1, round(sample_seconds / estimate))
    num_pairs = min(MAX_PAIRS, max(MIN_PAIRS if seconds else 1, round(seconds / (2 * calls * estimate))))
    samples: list[tuple[float, float]] = []
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(num_pairs):
            if number % 2:
                peer_seconds = seconds_per_call(peer, calls, device)
                samples.append((seconds_per_call(keepleft, calls, device), peer_seconds))
            else:
                keepleft_seconds = seconds_per_call(keepleft, calls, device)
                samples.append((keepleft_seconds, seconds_per_call(peer, calls, device)))
    finally:
        if gc_was_enabled:
            gc.enable()
    keepleft_samples, peer_samples = zip(*samples, strict=True)
    return Race(
        statistics.median(keepleft_samples),
        statistics.median(peer_samples),
        statistics.median(a / b for a, b in samples),
        min(keepleft_samples) / min(peer_samples),
        statistics.median(peer_samples) / min(peer_samples),
    )


def seconds_per_call(work: Work, calls: int, device: str = "cpu") -> float:
    """Seconds per call, by CUDA events on a GPU, by the wall clock elsewhere."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    started = perf_counter()
    for _ in range(calls):
        work()
    return (perf_counter() - started) / calls


def latency(work: Work, device: str = "cpu") -> float:
    """Wall-clock seconds of one call, host and device."""
    synchronize(device)
    started = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - started


def median_latency(work: Work, repetitions: int = 5, device: str = "cpu") -> float:
    """The median latency, after one call to warm up."""
    latency(work, device)
    return statistics.median(latency(work, device) for _ in range(repetitions))


def take_turns(
    works: Mapping[str, Work], rounds: int, *, warmup: int = 0, device: str = "cpu"
) -> dict[str, list[float]]:
    """The latencies of several implementations that take turns, `rounds` of each."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for number in range(warmup + rounds):
        for name, work in works.items():
            seconds = latency(work, device)
            if number >= warmup:
                samples[name].append(seconds)
    return samples


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
