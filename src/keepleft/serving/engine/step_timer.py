"""How long steps take, so that the scheduler can bound what one request costs the others."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import inf

from keepleft.serving.engine.scheduled_request import ScheduledRequest

SMOOTHING = 0.3  # weight of the newest measurement
MAX_GROWTH = 2.0  # more than so many times the time before is another's doing, and counts as that much


class StepTimer:
    """Smoothed times of decode steps by their number of rows, and of prefill by its number of tokens.

    Numbers are rounded up to a power of 2. What single requests take beyond that, for their logits processors
    and beams, is not in it: see `time_strategy`.
    """

    def __init__(self) -> None:
        self.decode_seconds: dict[int, float] = {}
        self.prefill_seconds: dict[int, float] = {}
        self.strategy_seconds = 0.0  # of the step so far

    @contextmanager
    def time_decode(self, num_rows: int) -> Iterator[None]:
        self.strategy_seconds = 0.0
        start = time.perf_counter()
        yield
        _note(self.decode_seconds, num_rows, time.perf_counter() - start - self.strategy_seconds)

    @contextmanager
    def time_strategy(self, batch: Collection[ScheduledRequest]) -> Iterator[None]:
        """Time what these requests take beyond a plain row of the step; each notes its part."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.strategy_seconds += seconds
        for scheduled in batch:
            scheduled.strategy_seconds = seconds / len(batch)

    @contextmanager
    def time_prefill(self, num_tokens: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        _note(self.prefill_seconds, num_tokens, time.perf_counter() - start)

    def prefill_tokens(self, seconds: float, minimum: int, maximum: int) -> int:
        """How many tokens can be prefilled in so many seconds.

        A number that was never tried is tried once the one before it turned out to be quick enough.
        """
        num_tokens = minimum
        while num_tokens < maximum and self.prefill_seconds.get(_bucket(num_tokens), inf) <= seconds:
            larger = min(2 * num_tokens, maximum)
            if self.prefill_seconds.get(_bucket(larger), 0.0) > seconds:
                break
            num_tokens = larger
        return num_tokens

    def estimate_decode(self, num_rows: int) -> float:
        """Seconds of a decode step of so many rows; 0.0 for none, or before the first step."""
        if not num_rows or not self.decode_seconds:
            return 0.0
        bucket = _bucket(num_rows)
        larger = [seconds for known, seconds in self.decode_seconds.items() if known >= bucket]
        if larger:  # more rows take no less time, and may have been measured since
            return min(larger)
        largest = max(self.decode_seconds)
        return self.decode_seconds[largest] * bucket / largest

    def in_rows(self, seconds: float, num_rows: int) -> float:
        """How many rows of a step of `num_rows` take so many seconds."""
        if not seconds:
            return 0.0
        row_seconds = self.estimate_decode(num_rows) / max(1, num_rows)
        return seconds / row_seconds if row_seconds else 0.0


def _bucket(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


def _note(seconds_by_size: dict[int, float], size: int, seconds: float) -> None:
    bucket = _bucket(max(1, size))
    previous = seconds_by_size.get(bucket, seconds)
    seconds_by_size[bucket] = previous + SMOOTHING * (min(seconds, MAX_GROWTH * previous) - previous)
