"""Numbers for Prometheus: what is counted as it happens, and what the engine says when it is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Of one server: nothing is shared with another in the same process."""

    def __init__(self, running: Any) -> None:
        self.registry = CollectorRegistry()
        made = lambda kind, name, told, labels=(), **how: kind(f"keepleft_{name}", told, labels, registry=self.registry, **how)
        self.requests = made(Counter, "requests", "requests that were answered", ("route", "status"))
        self.read = made(Counter, "tokens_read", "tokens of prompts")
        self.written = made(Counter, "tokens_written", "tokens that were written")
        self.whole = made(Histogram, "request_seconds", "from the request to the end of its answer", ("route",), buckets=QUICK)
        self.queue = made(Histogram, "queue_seconds", "until the engine turned to a request", buckets=QUICK)
        self.first = made(Histogram, "first_token_seconds", "from the request to its first token", buckets=QUICK)
        self.token = made(Histogram, "token_seconds", "for each token after the first", buckets=QUICK)
        self.registry.register(Engine(running))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Engine:
    """Whatever the engine counts: how many run and wait, how full its pages are."""

    def __init__(self, running: Any) -> None:
        self.running = running

    def collect(self) -> Iterator[Any]:
        for name, value in sorted(self.running.counts().items()):
            kind = CounterMetricFamily if name in ("read", "written", "failed") else GaugeMetricFamily
            word = re.sub(r"[^a-z0-9]", "_", name.lower())
            yield kind(f"keepleft_engine_{word}", f"{name}, as the engine counts it", value=value)

    def describe(self) -> list[Any]:
        return []  # names are known when they are asked for
