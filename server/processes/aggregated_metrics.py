"""Aggregates metrics of all API processes with those of the engines for /metrics and /buckets."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trencadis.core.errors import Unavailable
from trencadis.core.json_types import JsonObject
from trencadis.core.process import engine_messages
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.engine.engine_client import get_replicas
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.metrics import aggregate
from trencadis.server.metrics.bucket_metrics import describe_all_buckets
from trencadis.server.metrics.process_metrics import FRONT, ProcessesCollector
from trencadis.server.metrics.prometheus import PrometheusMetrics
from trencadis.server.metrics.sleep_metrics import SleepCollector
from trencadis.server.processes.fleet import Fleet
from trencadis.server.routes.http_settings import HttpSettings
from trencadis.server.tenants.admission import Admission

Families = list[aggregate.FamilySamples]


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
        self._by_process[index] = aggregate.unpack_registry(data)

    def retire_process(self, index: int) -> None:
        """Keeps the counters of a process that has ended and drops its gauges."""
        last = self._by_process.pop(index, [])
        self._retired = aggregate.aggregate([self._retired, aggregate.keep_counters(last)])

    def format_text(self) -> bytes:
        """Returns the metrics in Prometheus' text format.

        Raises:
            Unavailable: no API process was up yet.
        """
        if self._metrics is None:
            raise Unavailable("The server starts.", retry_after=1)
        own = [aggregate.from_metric(family) for family in self._metrics.registry.collect()]
        return aggregate.format_text(aggregate.aggregate([own, self._retired, *self._by_process.values()]))

    def format_buckets(self) -> bytes:
        """Returns the JSON of ``/buckets``.

        Raises:
            Unavailable: no API process was up yet.
        """
        if self._metrics is None:
            raise Unavailable("The server starts.", retry_after=1)
        shown: JsonObject = describe_all_buckets(get_replicas(self._engine), self._metrics.bucket_metrics)
        return msgspec.json.encode(shown)
