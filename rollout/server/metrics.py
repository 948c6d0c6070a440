"""What Prometheus scrapes: a registry of this server alone, filled by the routes and from the engine's own counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "miles_k3_"
VERIFIES = "verifies_accepting_"  # of the engine's names
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_ENGINE_GAUGES = {
    "running": "Requests that hold cache memory.",
    "waiting": "Requests that wait in the engine for cache memory.",
    "free_pages": "MLA latent pages that nobody uses.",
    "free_slots": "State slots that nobody uses.",
    "cache_bytes": "Memory of the caches.",
    "cache_pages": "Pages that the prefix cache holds.",
    "cache_slots": "State checkpoints that the prefix cache holds.",
}
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "shared_prompt_tokens": "Prompt tokens taken over from a twin that came at the same time.",
    "cached_prompt_tokens": "Prompt tokens taken over from the prefix cache.",
    "generated_tokens": "Tokens sampled.",
    "prefill_steps": "Steps that computed prompts.",
    "decode_steps": "Steps that sampled one token for each running request.",
    "retracted": "Requests that gave their memory up and started over.",
    "verify_steps": "Steps that verified drafted tokens.",
    "drafted_tokens": "Drafted tokens that were verified.",
    "accepted_tokens": "Drafted tokens that were accepted.",
}


class _EngineNumbers(Collector):
    """The engine's counters as they were last read."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        for name, text in _ENGINE_GAUGES.items():
            if name in self.values:
                yield GaugeMetricFamily(f"{PREFIX}engine_{name}", text, value=self.values[name])
        for name, text in _ENGINE_COUNTERS.items():
            if name in self.values:
                yield CounterMetricFamily(f"{PREFIX}engine_{name}", text, value=self.values[name])
        yield from self._accepted()

    def _accepted(self) -> Iterable[Metric]:
        """Verifies of a request by how many drafted tokens they accepted."""
        text = "Verifies of a request, by how many of its drafted tokens were accepted."
        family = CounterMetricFamily(f"{PREFIX}engine_verifies", text, labels=["accepted"])
        for name, value in self.values.items():
            if name.startswith(VERIFIES):
                family.add_metric([name.removeprefix(VERIFIES)], value)
        if family.samples:
            yield family


class Metrics:
    """`first_token` and `gap` may be called from the engine's thread, everything else from the server's loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineNumbers()
        self.registry.register(self._engine)
        self._requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests answered.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            f"{PREFIX}http_request_seconds", "From the request's head to the end of its answer.", ["route"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._first_token = Histogram(
            f"{PREFIX}time_to_first_token_seconds", "From admission to the first token of each answer.",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._gap = Histogram(
            f"{PREFIX}inter_token_seconds", "Between tokens of one answer.", buckets=SECONDS, registry=self.registry
        )
        self._in_flight = Gauge(f"{PREFIX}answers_in_flight", "Answers that run or wait.", registry=self.registry)
        self._capacity = Gauge(f"{PREFIX}answers_max", "Answers that may run or wait.", registry=self.registry)
        self._version = Gauge(
            f"{PREFIX}adapter_version", "Newest adapter version; -1: the base.", registry=self.registry
        )
        self._loaded = Gauge(f"{PREFIX}adapter_loaded", "Loaded adapters.", ["version"], registry=self.registry)
        self._draining = Gauge(f"{PREFIX}draining", "1 while the server shuts down.", registry=self.registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def gap(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._gap.observe(seconds / tokens)

    def text(
        self, engine: Mapping[str, float], *, in_flight: int, capacity: int, versions: Iterable[int], newest: int,
        draining: bool,
    ) -> bytes:  # fmt: skip
        """The page in Prometheus' text format."""
        self._engine.values = engine
        self._in_flight.set(in_flight)
        self._capacity.set(capacity)
        self._version.set(newest)
        self._loaded.clear()
        for version in versions:
            self._loaded.labels(str(version)).set(1)
        self._draining.set(draining)
        return generate_latest(self.registry)
