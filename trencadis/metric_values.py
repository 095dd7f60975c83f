"""The server's metrics as plain values, for offline callers: ``vllm:`` counters, gauges and histograms."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trencadis.core.report import EngineInfo, EngineStats
from trencadis.server.admission import Admission
from trencadis.server.engine.protocol import EngineClient
from trencadis.server.metrics.registry import Metrics
from trencadis.server.prompts.generation import Timing
from trencadis.server.prompts.service import TextService


@dataclass(slots=True)
class MetricValue:
    """A metric's name and labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Counter(MetricValue):
    """A number that only grows."""

    value: float = 0


@dataclass(slots=True)
class Gauge(MetricValue):
    """A number as it is now."""

    value: float = 0


@dataclass(slots=True)
class Histogram(MetricValue):
    """Values in buckets: ``buckets`` counts those up to each bound."""

    count: int = 0
    sum: float = 0
    buckets: dict[str, int] = field(default_factory=dict)


class LocalMetrics:
    """The server's registry over an engine in this process.

    Args:
        read: the engine's counters; their lists hold what came since the last time.
    """

    def __init__(self, model: str, service: TextService, info: EngineInfo, read: Callable[[], EngineStats]) -> None:
        self.observers: list[Callable[[EngineStats], None]] = []
        self.restarts = self.sleep_level = 0
        self.info = info
        self.stats = EngineStats()
        self._read = read
        self._metrics = metrics_of(model, service, cast(EngineClient, self))

    def ended(self, timing: Timing, why: str = "") -> None:
        """Records the end of a request; ``why``: the reason, if its streams do not say it."""
        timing.finish += [why] if why else []
        timing.end = time.monotonic()
        self._metrics.finished(timing)

    def refresh(self) -> None:
        """Reads the engine's counters."""
        self.stats = self._read()
        for observer in self.observers:
            observer(self.stats)

    def values(self) -> list[MetricValue]:
        """Every metric now."""
        self.refresh()
        return read_metrics(self._metrics)


def metrics_of(model: str, service: TextService, engine: EngineClient) -> Metrics:
    """The server's registry over ``engine``; nothing waits for admission offline."""
    images = service.images
    return Metrics(model, service.max_model_len, engine, Admission(), lambda: None if images is None else images.cache)


def read_metrics(metrics: Metrics) -> list[MetricValue]:
    """Every ``vllm:`` metric now, one value for each set of labels."""
    found: list[MetricValue] = []
    for family in metrics.registry.collect():
        if family.name.startswith("vllm:"):
            found += _histograms(family.name, family.samples) if family.type == "histogram" else _plain(family)
    return found


def _plain(family: Any) -> list[MetricValue]:
    kind = Counter if family.type == "counter" else Gauge
    return [kind(family.name, dict(s.labels), s.value) for s in family.samples if not s.name.endswith("_created")]


def _histograms(name: str, samples: Sequence[Any]) -> list[MetricValue]:
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
