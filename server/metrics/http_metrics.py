"""HTTP requests by route, under the names of FastAPI's usual instrumentation."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

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
            "http_refused_requests", "requests refused for their head or the size of their body", ("status", "reason"),
            registry=registry,
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
