"""Prometheus metrics: counters and histograms of requests, and the statistics of the engine.

The operator sees everything; the holder of another key sees what this key has used.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from keepleft.serving.engine.thread import EngineThread

COUNTERS = (  # statistics of the engine that only grow
    "prompt_tokens",
    "generation_tokens",
    "failures",
    "preemptions",
    "prefix_cache_hits",
)
UNPREFIXED = ("preemptions", "prefix_cache_hits", "prefix_cache_pages")  # named as in vLLM, without engine_
USAGE_METRICS = {
    "requests": "requests with this key",
    "prompt_tokens": "tokens of their prompts",
    "generation_tokens": "tokens generated for them",
}
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one server; another server in the same process has its own registry."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests answered", ("route", "status"))
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = self._counter("generation_tokens", "generated tokens")
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "from the request to the end of its response", ("route",)
        )
        self.queue_time = self._histogram("queue_seconds", "from submission to the engine to its first step")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "from the request to its first token"
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "for each token after the first"
        )
        self.registry.register(EngineCollector(engine_thread))
        self.usage_by_key: dict[str, Tally[str]] = {}  # by tenant; bounded by the number of keys

    def _counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"keepleft_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(
            f"keepleft_{name}", documentation, labels, registry=self.registry, buckets=LATENCY_BUCKETS
        )

    def count_usage(self, key: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count a request for the key that it was made with."""
        self.usage_by_key.setdefault(key, Tally()).update(
            requests=1, prompt_tokens=prompt_tokens, generation_tokens=generation_tokens
        )

    def render(self) -> bytes:
        """All metrics, in the text format of Prometheus."""
        return generate_latest(self.registry)

    def render_usage(self, key: str) -> bytes:
        """What one key has used, in the same format."""
        registry = CollectorRegistry()
        usage = self.usage_by_key.get(key, Tally())
        for name, documentation in USAGE_METRICS.items():
            Counter(f"keepleft_key_{name}", documentation, registry=registry).inc(usage[name])
        return generate_latest(registry)


class EngineCollector:
    """The statistics of the engine when they are asked for: requests running and waiting, KV-cache pages."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self.engine_thread = engine_thread

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self.engine_thread.stats().items()):
            family_class = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            metric_name = re.sub(r"[^a-z0-9]", "_", name.lower())
            prefix = "keepleft_" if name in UNPREFIXED else "keepleft_engine_"
            yield family_class(f"{prefix}{metric_name}", f"{name}, by the engine", value=value)

    def describe(self) -> list[Metric]:
        return []  # the names are known only when they are collected
