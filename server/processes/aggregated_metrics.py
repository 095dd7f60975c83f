"""Combines the metrics of all API processes and of the engines into one server's, for /metrics and /buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from trencadis.core.errors import Unavailable
from trencadis.core.json_types import JsonObject
from trencadis.core.process import engine_messages
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.engine.engine_client_and_request_timing import get_replicas
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.metrics.bucket_metrics import describe_all_buckets
from trencadis.server.metrics.process_tenant_and_sleep_collectors import (
    DEPRECATED_PACE,
    FRONT,
    ProcessesCollector,
    SleepCollector,
)
from trencadis.server.metrics.prometheus import PrometheusMetrics
from trencadis.server.processes.multi_engine_client import Fleet
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission

CREATED = "_created"
"""Suffix of samples whose value is a time; of several processes the first counts."""
BETWEEN, OLD_BETWEEN = "vllm:inter_token_latency_seconds", f"vllm:{DEPRECATED_PACE}"


class SampleValue(msgspec.Struct, frozen=True, array_like=True):
    """One sample: its name, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


class FamilySamples(msgspec.Struct, array_like=True):
    """One metric family of a registry; all families of API processes can be summed."""

    name: str
    text: str
    kind: str
    samples: list[SampleValue]


def pack_registry(registry: Collector) -> bytes:
    """Encodes all families of ``registry``."""
    return msgspec.msgpack.encode([from_metric(family) for family in registry.collect()])


def from_metric(family: Metric) -> FamilySamples:
    """Converts a family of the library."""
    samples = [SampleValue(s.name, dict(s.labels), float(s.value)) for s in family.samples]
    return FamilySamples(family.name, family.documentation, family.type, samples)


unpack_registry = msgspec.msgpack.Decoder(list[FamilySamples]).decode


def aggregate(parts: Iterable[Sequence[FamilySamples]]) -> list[FamilySamples]:
    """Returns one family per name with the sums of its samples, in the order of first occurrence."""
    kinds: dict[str, FamilySamples] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            kinds.setdefault(family.name, family)
            found = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                if key not in found:
                    found[key] = sample.value
                elif sample.name.endswith(CREATED):
                    found[key] = min(found[key], sample.value)
                else:
                    found[key] += sample.value
    return [
        FamilySamples(
            name, kinds[name].text, kinds[name].kind,
            [SampleValue(sample, dict(labels), value) for (sample, labels), value in found.items()],
        )
        for name, found in sums.items()
    ]  # fmt: skip


def keep_counters(part: Sequence[FamilySamples]) -> list[FamilySamples]:
    """Returns the counters of a process's metrics, which outlive it; gauges are dropped."""
    return [family for family in part if family.kind != "gauge"]


def format_text(families: Sequence[FamilySamples]) -> bytes:
    """Returns Prometheus' text format. If the old name of the times between tokens is exported, it has the sums too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FamilyCollector(families))
    return generate_latest(registry)


class _FamilyCollector(Collector):
    """Collector of summed families for the library."""

    def __init__(self, families: Sequence[FamilySamples]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yields one family per name."""
        between = next((family for family in self._families if family.name == BETWEEN), None)
        for family in self._families:
            samples = family.samples
            if family.name == OLD_BETWEEN and between is not None:
                samples = [
                    SampleValue(s.name.replace(BETWEEN, OLD_BETWEEN), s.labels, s.value) for s in between.samples
                ]
            made = Metric(family.name, family.text, family.kind)
            made.samples = [Sample(s.name, s.labels, s.value) for s in samples]
            yield made


Families = list[FamilySamples]


class AggregatedMetrics:
    """The data of /metrics and /buckets.

    All metrics of an API process can be summed (``PrometheusMetrics`` as a part).

    Args:
        fair_queued: counts requests in the fair queues of all API processes.
    """

    def __init__(self, settings: Settings, engine: Supervisor | Fleet, fair_queued: Callable[[], int]) -> None:
        self._settings, self._engine, self._fair_queued = settings, engine, fair_queued
        self._metrics: PrometheusMetrics | None = None
        self._by_process: dict[int, Families] = {}
        self._retired: Families = []
        self._early_stats: list[tuple[int, engine_messages.EngineStats]] = []
        """Counter messages that arrived before the sizes of histograms were known."""
        self._listeners = [
            (one, lambda stats, i=i: self._early_stats.append((i, stats))) for i, one in enumerate(get_replicas(engine))
        ]
        for one, listener in self._listeners:
            one.observers.append(listener)

    def start(self, max_model_len: int) -> None:
        """Starts with the first API process; all processes have histograms of these sizes."""
        if self._metrics is not None:
            return
        for one, listener in self._listeners:
            one.observers.remove(listener)
        config = self._settings.server
        http = HttpSettings(config, self._settings.engine.model, max_running=self._running)
        hidden = config.show_hidden_metrics or bool(config.show_hidden_metrics_for_version)
        made = self._metrics = PrometheusMetrics(
            http.name, max_model_len, self._engine, Admission(http.bounds), config=self._settings.engine,
            hidden=hidden, fair_queued=self._fair_queued,
        )  # fmt: skip
        made.registry.register(ProcessesCollector(role=FRONT))
        if config.enable_sleep_mode or config.sleep_after:
            SleepCollector(made.registry, self._engine)
        for i, stats in self._early_stats:
            made.on_stats(stats, i)
        self._early_stats.clear()

    @property
    def _running(self) -> int:
        return (self._settings.engine.max_num_seqs or 128) * self._settings.server.data_parallel_size

    def update_process(self, index: int, data: bytes) -> None:
        """Stores the current metrics of API process ``index``."""
        self._by_process[index] = unpack_registry(data)

    def retire_process(self, index: int) -> None:
        """Keeps the counters of a process that has ended and drops its gauges."""
        last = self._by_process.pop(index, [])
        self._retired = aggregate([self._retired, keep_counters(last)])

    def format_text(self) -> bytes:
        """Returns the metrics in Prometheus' text format.

        Raises:
            Unavailable: no API process was up yet.
        """
        if self._metrics is None:
            raise Unavailable("The server starts.", retry_after=1)
        own = [from_metric(family) for family in self._metrics.registry.collect()]
        return format_text(aggregate([own, self._retired, *self._by_process.values()]))

    def format_buckets(self) -> bytes:
        """Returns the JSON of ``/buckets``.

        Raises:
            Unavailable: no API process was up yet.
        """
        if self._metrics is None:
            raise Unavailable("The server starts.", retry_after=1)
        shown: JsonObject = describe_all_buckets(get_replicas(self._engine), self._metrics.bucket_metrics)
        return msgspec.json.encode(shown)
