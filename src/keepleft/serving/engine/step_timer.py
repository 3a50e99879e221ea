"""How long steps take, so that the scheduler can bound what one request costs the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SMOOTHING = 0.3  # weight of the newest measurement


class StepTimer:
    """Smoothed times of decode steps by their number of rows, and of a prefilled token."""

    def __init__(self) -> None:
        self.decode_seconds: dict[int, float] = {}  # by rows, rounded up to a power of 2
        self.seconds_per_token: float | None = None  # of prefill; None before the first

    @contextmanager
    def time_decode(self, num_rows: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        bucket = _bucket(num_rows)
        seconds = time.perf_counter() - start
        self.decode_seconds[bucket] = _smooth(self.decode_seconds.get(bucket), seconds)

    @contextmanager
    def time_prefill(self, num_tokens: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = (time.perf_counter() - start) / max(1, num_tokens)
        self.seconds_per_token = _smooth(self.seconds_per_token, seconds)

    def estimate_decode(self, num_rows: int) -> float:
        """Seconds of a decode step of so many rows; 0.0 for none, or before the first step."""
        if not num_rows or not self.decode_seconds:
            return 0.0
        bucket = _bucket(num_rows)
        if bucket in self.decode_seconds:
            return self.decode_seconds[bucket]
        nearest = min(self.decode_seconds, key=lambda known: abs(known.bit_length() - bucket.bit_length()))
        seconds = self.decode_seconds[nearest]
        return seconds * bucket / nearest if bucket > nearest else seconds


def _bucket(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


def _smooth(previous: float | None, value: float) -> float:
    return value if previous is None else previous + SMOOTHING * (value - previous)
