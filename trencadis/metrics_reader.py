"""Returns the server's metrics as plain values to offline callers: ``vllm:`` counters, gauges and histograms."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trencadis.core.engine_stats import EngineInfo, EngineStats
from trencadis.server.engine.engine_client_and_request_timing import EngineClient, RequestTiming
from trencadis.server.metrics.prometheus import PrometheusMetrics
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission


@dataclass(slots=True)
class MetricValue:
    """Name and labels of a metric."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Counter(MetricValue):
    """A metric that only increases."""

    value: float = 0


@dataclass(slots=True)
class Gauge(MetricValue):
    """A metric with its current value."""

    value: float = 0


@dataclass(slots=True)
class Histogram(MetricValue):
    """Values in buckets: ``buckets`` counts those up to each bound."""

    count: int = 0
    sum: float = 0
    buckets: dict[str, int] = field(default_factory=dict)


class LocalMetrics:
    """The server's metrics registry over an engine in this process.

    Args:
        read: returns the engine's statistics; their lists hold the entries since the last call.
    """

    def __init__(self, model: str, service: TextService, info: EngineInfo, read: Callable[[], EngineStats]) -> None:
        self.observers: list[Callable[[EngineStats], None]] = []
        self.restarts = self.sleep_level = 0
        self.info = info
        self.plan = None
        self.stats = EngineStats()
        self._read = read
        self._metrics = make_metrics(model, service, cast(EngineClient, self))

    def record_end(self, timing: RequestTiming, reason: str = "") -> None:
        """Records the end of a request; ``reason`` overrides the finish reason of its streams."""
        timing.finish += [reason] if reason else []
        timing.end = time.monotonic()
        self._metrics.record_finished(timing)

    def refresh(self) -> None:
        """Reads the engine's statistics and updates the metrics."""
        self.stats = self._read()
        for observer in self.observers:
            observer(self.stats)

    def values(self) -> list[MetricValue]:
        """Returns the current value of every metric."""
        self.refresh()
        return read_metrics(self._metrics)


def make_metrics(model: str, service: TextService, engine: EngineClient) -> PrometheusMetrics:
    """Creates the server's metrics registry over ``engine``; offline no request waits for admission."""
    images = service.images
    return PrometheusMetrics(
        model, service.max_model_len, engine, Admission(), lambda: None if images is None else images.cache
    )


def read_metrics(metrics: PrometheusMetrics) -> list[MetricValue]:
    """Returns the current value of every ``vllm:`` metric, one for each set of labels."""
    found: list[MetricValue] = []
    for family in metrics.registry.collect():
        if family.name.startswith("vllm:"):
            found += (
                _histogram_values(family.name, family.samples) if family.type == "histogram" else _simple_values(family)
            )
    return found


def _simple_values(family: Any) -> list[MetricValue]:
    kind = Counter if family.type == "counter" else Gauge
    return [kind(family.name, dict(s.labels), s.value) for s in family.samples if not s.name.endswith("_created")]


def _histogram_values(name: str, samples: Sequence[Any]) -> list[MetricValue]:
    made: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in samples:
        labels = {k: v for k, v in sample.labels.items() if k != "le"}
        one = made.setdefault(tuple(sorted(labels.items())), Histogram(name, labels))
        if sample.name.endswith("_bucket"):
            one.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            one.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            one.sum = sample.value
    return [*made.values()]
