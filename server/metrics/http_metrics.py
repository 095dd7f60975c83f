"""HTTP requests by route, under the names of FastAPI's usual instrumentation.

Metrics of use and refusals of each tenant of the key file; labels have names, never keys.

Metrics of traces: how many were sent, how many were dropped, and their CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis.server.tenants.tenant_registry import TenantRegistry

SECONDS = (0.1, 0.5, 1)
"""Histogram buckets of the seconds by route and method."""
FINE = (.01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)  # fmt: skip
"""Histogram buckets of the seconds of all routes together."""


class HttpMetrics:
    """Counts, seconds and bytes of answered requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("http_requests", "HTTP requests", ("handler", "method", "status"), registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds", "HTTP seconds", ("handler", "method"), buckets=SECONDS, registry=registry
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds", "HTTP seconds of all routes", buckets=FINE, registry=registry
        )
        self._received = Summary("http_request_size_bytes", "bytes of request bodies", ("handler",), registry=registry)
        self._refusals = Counter(
            "http_refused_requests", "requests refused for their head, its form or the size of their body",
            ("status", "reason"), registry=registry,
        )  # fmt: skip
        self._sent = Summary("http_response_size_bytes", "bytes of response bodies", ("handler",), registry=registry)

    def observe(self, route: str, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Records an answered request; ``received`` and ``sent`` are bytes of the bodies."""
        self._requests.labels(route, method, f"{status // 100}xx").inc()
        self._seconds.labels(route, method).observe(seconds)
        self._fine.observe(seconds)
        self._received.labels(route).observe(received)
        self._sent.labels(route).observe(sent)

    def count_refusal(self, status: int, reason: str) -> None:
        """Counts a request refused with ``status``; ``reason`` is one of few words: host, origin, body, fields, ..."""
        self._refusals.labels(str(status), reason).inc()


USED = {
    "requests_per_minute": ("tenant_requests", "admitted requests of a tenant"),
    "tokens_per_minute": ("tenant_tokens", "prompt and output tokens of a tenant"),
    "pixels_per_minute": ("tenant_pixels", "pixels of a tenant's media"),
}


class TenantCollector(Collector):
    """Collector of the current values of all tenants."""

    def __init__(self, tenants: TenantRegistry) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Yields one sample per tenant; refusals by limit."""
        accounts = list(self._tenants.accounts.items())
        for field, (name, text) in USED.items():
            used = CounterMetricFamily(f"vllm:{name}", text, labels=("tenant",))
            for tenant, account in accounts:
                used.add_metric((tenant,), account.used[field])
            yield used
        inside = GaugeMetricFamily("vllm:tenant_inside", "choices of a tenant inside the server", labels=("tenant",))
        refused = CounterMetricFamily("vllm:tenant_rejected", "requests beyond a limit", labels=("tenant", "limit"))
        for tenant, account in accounts:
            inside.add_metric((tenant,), account.own)
            for limit, count in account.rejected.items():
                refused.add_metric((tenant, limit), count)
        yield inside
        yield refused


class TraceCounters(Protocol):
    """Protocol of a trace sender's counters."""

    sent: int
    dropped: int

    @property
    def cpu_seconds(self) -> float:
        """CPU time so far."""
        ...


class TraceCollector(Collector):
    """Collector of ``vllm:traces_sent``, ``vllm:traces_dropped`` and ``vllm:traces_cpu_seconds``."""

    def __init__(self, traces: TraceCounters) -> None:
        self._traces = traces

    def collect(self) -> Iterator[Metric]:
        """Yields the current counters."""
        for name, text, value in (
            ("traces_sent", "traces that the collector took, or that the sampler left out", self._traces.sent),
            ("traces_dropped", "traces that no collector took in time", self._traces.dropped),
            ("traces_cpu_seconds", "CPU time of making and sending traces", self._traces.cpu_seconds),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text)
            family.add_metric((), value)
            yield family
