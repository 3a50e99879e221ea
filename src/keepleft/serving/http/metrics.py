"""Numbers for Prometheus: what is counted as it happens, and what the engine says when it is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

# of the engine: they only grow
COUNTERS = ("prompt_tokens", "generation_tokens", "failures", "preemptions", "prefix_cache_hits")
# named as other servers name them, without engine_
UNPREFIXED = ("preemptions", "prefix_cache_hits", "prefix_cache_pages")
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Of one server: nothing is shared with another in the same process."""

    def __init__(self, engine_thread: Any) -> None:
        self.registry = CollectorRegistry()
        make_metric = lambda metric_class, name, documentation, labels=(), **options: metric_class(
            f"keepleft_{name}", documentation, labels, registry=self.registry, **options
        )
        self.requests = make_metric(Counter, "requests", "requests that were answered", ("route", "status"))
        self.prompt_tokens = make_metric(Counter, "prompt_tokens", "tokens of prompts")
        self.generation_tokens = make_metric(Counter, "generation_tokens", "tokens that were written")
        self.e2e_request_latency = make_metric(
            Histogram,
            "e2e_request_latency_seconds",
            "from the request to the end of its answer",
            ("route",),
            buckets=LATENCY_BUCKETS,
        )
        self.queue_time = make_metric(
            Histogram, "queue_seconds", "until the engine turned to a request", buckets=LATENCY_BUCKETS
        )
        self.time_to_first_token = make_metric(
            Histogram,
            "time_to_first_token_seconds",
            "from the request to its first token",
            buckets=LATENCY_BUCKETS,
        )
        self.time_per_output_token = make_metric(
            Histogram,
            "time_per_output_token_seconds",
            "for each token after the first",
            buckets=LATENCY_BUCKETS,
        )
        self.registry.register(EngineCollector(engine_thread))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class EngineCollector:
    """Whatever the engine counts: how many run and wait, how full its pages are."""

    def __init__(self, engine_thread: Any) -> None:
        self.engine_thread = engine_thread

    def collect(self) -> Iterator[Any]:
        for name, value in sorted(self.engine_thread.stats().items()):
            family_class = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            metric_name = re.sub(r"[^a-z0-9]", "_", name.lower())
            yield family_class(
                f"keepleft_{'' if name in UNPREFIXED else 'engine_'}{metric_name}",
                f"{name}, as the engine counts it",
                value=value,
            )

    def describe(self) -> list[Any]:
        return []  # names are known when they are asked for
