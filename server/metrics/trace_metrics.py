"""Metrics of traces: how many were sent, how many were dropped, and their CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


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
