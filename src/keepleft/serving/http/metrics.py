"""Prometheus metrics: counters and histograms of requests, and the statistics of the engine.

The operator sees everything; the holder of another key sees what this key has used.
"""

from __future__ import annotations

import re
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTERS = (  # statistics of the engine that only grow
    "prompt_tokens",
    "generation_tokens",
    "failures",
    "preemptions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "steps",
    "step_seconds",
)
UNPREFIXED = (
    "preemptions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prefix_cache_pages",
)  # named as in vLLM, without engine_
USAGE_METRICS = {
    "requests": "requests with this key",
    "prompt_tokens": "tokens of their prompts",
    "generation_tokens": "tokens generated for them",
    "rate_limited": "those of them that were refused with 429",
}
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RECENT_SECONDS = 300.0
MAX_RECENT = 512  # latencies
MAX_REPLICA_LENGTH = 253  # as long as the name of a pod may be


class Metrics:
    """The metrics of one server; another server in the same process has its own registry.

    `key_label`: what the operator's metrics call an API key; None on a server without keys. `replica`: the
    label of all metrics that tells this server from others of the same model; None for no such label.
    """

    def __init__(
        self, model_name: str, key_label: Callable[[str], str] | None = None, replica: str | None = None
    ) -> None:
        if replica is not None:
            check_replica(replica)
        self.replica = replica
        self.registry = CollectorRegistry()
        self.engine_collector = EngineCollector()
        self.load_collector = LoadCollector(model_name)
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
        self.registry.register(self.engine_collector)
        self.registry.register(self.load_collector)
        self.recent_ttft = RecentLatencies()
        self.responses: Tally[str] = Tally()  # by class of their status
        self.usage_by_key: dict[str, Tally[str]] = {}  # by tenant; bounded by the number of keys
        if key_label is not None:
            self.registry.register(UsageCollector(self.usage_by_key, key_label))

    def _counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"keepleft_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(
            f"keepleft_{name}", documentation, labels, registry=self.registry, buckets=LATENCY_BUCKETS
        )

    def count_response(self, status: int) -> None:
        self.responses["429" if status == 429 else f"{status // 100}xx"] += 1

    def count_usage(self, key: str, status: int, prompt_tokens: int, generation_tokens: int) -> None:
        """Count a request for the key that it was made with."""
        self.usage_by_key.setdefault(key, Tally()).update(
            requests=1,
            rate_limited=int(status == 429),
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
        )

    def observe_ttft(self, seconds: float) -> None:
        self.time_to_first_token.observe(seconds)
        self.recent_ttft.add(seconds, time.monotonic())

    def render(self, engine_stats: Mapping[str, float]) -> bytes:
        """All metrics, in the text format of Prometheus."""
        self.engine_collector.stats = self.load_collector.stats = engine_stats
        return self._render(self.registry)

    def render_usage(self, key: str) -> bytes:
        """What one key has used, in the same format."""
        registry = CollectorRegistry()
        registry.register(UsageCollector({key: self.usage_by_key.get(key, Tally())}))
        return self._render(registry)

    def _render(self, registry: CollectorRegistry) -> bytes:
        if self.replica is None:
            return generate_latest(registry)
        labelled = CollectorRegistry()
        labelled.register(ReplicaCollector(registry, self.replica))
        return generate_latest(labelled)


def check_replica(name: str) -> None:
    """Raise ValueError for a name of a replica that is not plain."""
    if not re.fullmatch(rf"[A-Za-z0-9._:/-]{{1,{MAX_REPLICA_LENGTH}}}", name):
        raise ValueError(
            f"the name of the replica is {name[:40]!r}: use at most {MAX_REPLICA_LENGTH} letters, digits, "
            "dots, colons, slashes, hyphens and underscores"
        )


class ReplicaCollector:
    """The metrics of a registry, each with the label `replica`."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self.registry = registry
        self.replica = replica

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            family.samples = [
                sample._replace(labels={"replica": self.replica, **sample.labels})
                for sample in family.samples
            ]
            yield family

    def describe(self) -> list[Metric]:
        return []  # the registry knows them


class RecentLatencies:
    """The latencies of the last `RECENT_SECONDS`, at most `MAX_RECENT` of them."""

    def __init__(self) -> None:
        self.latencies: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)  # when, and how long

    def add(self, seconds: float, now: float) -> None:
        self.latencies.append((now, seconds))

    def quantiles(self, fractions: Sequence[float], now: float) -> tuple[int, list[float | None]]:
        """How many there are, and their quantiles; None without any."""
        ordered = sorted(seconds for when, seconds in self.latencies if now - when <= RECENT_SECONDS)
        if not ordered:
            return 0, [None] * len(fractions)
        last = len(ordered) - 1
        return len(ordered), [round(ordered[round(fraction * last)], 4) for fraction in fractions]


class UsageCollector:
    """What API keys have used, with the label of each; without `key_label`, of the only one."""

    def __init__(
        self, usage_by_key: Mapping[str, Tally[str]], key_label: Callable[[str], str] | None = None
    ) -> None:
        self.usage_by_key = usage_by_key
        self.key_label = key_label

    def collect(self) -> Iterator[Metric]:
        for name, documentation in USAGE_METRICS.items():
            labels = () if self.key_label is None else ("key",)
            family = CounterMetricFamily(f"keepleft_key_{name}", documentation, labels=labels)
            for key, usage in self.usage_by_key.items():
                family.add_metric([] if self.key_label is None else [self.key_label(key)], usage[name])
            yield family

    def describe(self) -> list[Metric]:
        return []  # nothing is collected before it is asked for


class EngineCollector:
    """The statistics of the engine: requests running and waiting, KV-cache pages."""

    def __init__(self) -> None:
        self.stats: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self.stats.items()):
            family_class = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            metric_name = re.sub(r"[^a-z0-9]", "_", name.lower())
            prefix = "keepleft_" if name in UNPREFIXED else "keepleft_engine_"
            yield family_class(f"{prefix}{metric_name}", f"{name}, by the engine", value=value)

    def describe(self) -> list[Metric]:
        return []  # the names are known only when they are collected


class LoadCollector:
    """The load of the engine under vLLM's names, by which gateways choose among replicas."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.stats: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        running = stats.get("running", 0)
        # What came during a step waits, too, though the engine does not know it yet.
        waiting = max(0, stats.get("in_flight", 0) - running)
        num_pages = stats.get("pages", 0)
        pages_in_use = stats.get("pages_used", 0) - stats.get("prefix_cache_pages", 0)
        for name, documentation, value in (
            ("num_requests_running", "requests in the batch", running),
            ("num_requests_waiting", "requests that wait for a place in the batch", waiting),
            (
                "kv_cache_usage_perc",
                "the fraction of KV-cache pages that requests use, from 0 to 1; 0 for an encoder",
                pages_in_use / num_pages if num_pages else 0.0,
            ),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=("model_name",))
            family.add_metric([self.model_name], value)
            yield family

    def describe(self) -> list[Metric]:
        return []  # as of the engine
