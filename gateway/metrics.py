"""The gateway's metrics, in base units, and what its decode workers say of themselves when they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.router import Router
from rpc.v1 import worker_pb2

SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

GAUGES = (
    "blocks_total",
    "blocks_free",
    "sources_held",
    "imports_active",
    "blocks_quarantined",
    "requests_running",
    "requests_waiting",
)


class Metrics:
    """One gateway's, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_http_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.in_flight = Gauge("kvferry_http_requests_in_flight", "Requests being answered.", registry=registry)
        self.disconnects = Counter(
            "kvferry_client_disconnects", "Clients that left before their answer was complete.", registry=registry
        )
        self.prompt_tokens = Counter("kvferry_prompt_tokens", "Tokens of prompts sent to workers.", registry=registry)
        self.output_tokens = Counter("kvferry_output_tokens", "Tokens drawn for answers.", registry=registry)
        self.ttft = Histogram(
            "kvferry_time_to_first_token_seconds",
            "From the request to its first token.",
            registry=registry,
            buckets=SHORT_S,
        )
        self.tpot = Histogram(
            "kvferry_time_per_output_token_seconds",
            "Mean time between tokens after the first, of answers of more than one token.",
            registry=registry,
            buckets=SHORT_S,
        )
        self.e2e = Histogram(
            "kvferry_request_duration_seconds", "From the request to its end.", registry=registry, buckets=LONG_S
        )
        self._workers = _Workers()
        registry.register(self._workers)

    async def render(self, router: Router, timeout_s: float) -> bytes:
        """The text exposition. A worker that does not answer in time is down and says nothing else."""
        workers = router.workers
        states = await asyncio.gather(*(worker.status(timeout_s) for worker in workers))
        self._workers.states = {worker.name: state for worker, state in zip(workers, states, strict=True)}
        return generate_latest(self._registry)


class _Workers(Collector):
    """What the workers said last."""

    def __init__(self) -> None:
        self.states: dict[str, worker_pb2.WorkerStatus | None] = {}

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        states = {name: state for name, state in self.states.items() if state is not None}
        up = GaugeMetricFamily("kvferry_worker_up", "Whether a worker answers.", labels=["worker"])
        for name in self.states:
            up.add_metric([name], name in states)
        yield up
        for field in GAUGES:
            gauge = GaugeMetricFamily(f"kvferry_worker_{field}", f"{field} of a worker's status.", labels=["worker"])
            for name, state in states.items():
                gauge.add_metric([name], getattr(state, field))
            yield gauge
        counts = CounterMetricFamily(
            "kvferry_worker_events", "A worker's counters, by name.", labels=["worker", "counter"]
        )
        for name, state in states.items():
            for counter, value in sorted(state.counters.items()):
                counts.add_metric([name, counter], value)
        yield counts
