"""Metrics of sleep mode: the state, and how long falling asleep and waking take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

STATES = ("awake", "weights_offloaded", "discard_all")
"""States by level (0, 1 and 2), with vLLM's names. Here both sleep levels end the engine's process."""
OPERATIONS = ("sleep", "wake")
SECONDS = (.01, .1, 1, 10, 30, 60, 120, 300, 600)  # fmt: skip


class SleepingEngine(Protocol):
    """Protocol of an engine that can sleep."""

    on_operation: list[Callable[[str, float], None]]

    @property
    def sleep_level(self) -> int:
        """0: awake; else the level at which it sleeps, until it has woken up."""
        ...

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        ...


def make_sleep_state(values: Sequence[str], level: int) -> GaugeMetricFamily:
    """Returns ``vllm:engine_sleep_state``: 1 for the current state."""
    gauge = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 for the state that holds", labels=("model_name", "engine", "sleep_state")
    )
    for i, state in enumerate(STATES):
        gauge.add_metric((*values, state), int(i == min(level, len(STATES) - 1)))
    return gauge


class SleepCollector(Collector):
    """Collector of ``vllm:sleep_mode_operation*`` of an engine that may sleep; registers itself."""

    def __init__(self, registry: CollectorRegistry, sleeper: SleepingEngine) -> None:
        self._sleeper = sleeper
        self._seconds = Histogram(
            "vllm:sleep_mode_operation_duration_seconds", "seconds of falling asleep and of waking", ("operation",),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        for name in OPERATIONS:
            self._seconds.labels(name)
        sleeper.on_operation.append(self.record_operation)
        registry.register(self)

    def record_operation(self, operation: str, seconds: float) -> None:
        """Records an operation."""
        self._seconds.labels(operation).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the number of running operations."""
        gauge = GaugeMetricFamily(
            "vllm:sleep_mode_operations_in_flight", "operations that go on now", labels=("operation",)
        )
        for name in OPERATIONS:
            gauge.add_metric((name,), int(self._sleeper.sleep_operation == name))
        yield gauge
