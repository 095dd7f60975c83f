"""The figures of a server with several API processes: the engines' are the front's, the rest is added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from trencadis.core.errors import Unavailable
from trencadis.core.process import wire
from trencadis.server.admission import Admission
from trencadis.server.config.settings import Settings
from trencadis.server.engine.protocol import replicas
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.fleet.fleet import Fleet
from trencadis.server.metrics import added
from trencadis.server.metrics.bucket_table import shown_all
from trencadis.server.metrics.processes import FRONT, ProcessesCollector
from trencadis.server.metrics.registry import Metrics
from trencadis.server.metrics.sleep import SleepCollector
from trencadis.server.routes.settings import HttpSettings

Families = list[added.FamilyFigures]


class Figures:
    """What /metrics and /buckets show. Everything that an API process tells can be added up (``Metrics`` as a part).

    Args:
        outside: counts requests that wait in any API process for their tenant's turn.
    """

    def __init__(self, settings: Settings, engine: Supervisor | Fleet, outside: Callable[[], int]) -> None:
        self._settings, self._engine, self._outside = settings, engine, outside
        self._metrics: Metrics | None = None
        self._last: dict[int, Families] = {}
        self._ended: Families = []
        self._early: list[tuple[int, wire.EngineStats]] = []
        """Messages of counters that came before it was known how large histograms are."""
        self._listeners = [
            (one, lambda stats, i=i: self._early.append((i, stats))) for i, one in enumerate(replicas(engine))
        ]
        for one, listener in self._listeners:
            one.observers.append(listener)

    def begin(self, max_model_len: int) -> None:
        """The first API process is up; all have histograms of these sizes."""
        if self._metrics is not None:
            return
        for one, listener in self._listeners:
            one.observers.remove(listener)
        config = self._settings.server
        http = HttpSettings(config, self._settings.engine.model, running=self._running)
        hidden = config.show_hidden_metrics or bool(config.show_hidden_metrics_for_version)
        made = self._metrics = Metrics(
            http.name, max_model_len, self._engine, Admission(http.bounds), config=self._settings.engine,
            hidden=hidden, outside=self._outside,
        )  # fmt: skip
        made.registry.register(ProcessesCollector(role=FRONT))
        if config.enable_sleep_mode or config.sleep_after:
            SleepCollector(made.registry, self._engine)
        for i, stats in self._early:
            made.on_stats(stats, i)
        self._early.clear()

    @property
    def _running(self) -> int:
        return (self._settings.engine.max_num_seqs or 128) * self._settings.server.data_parallel_size

    def learn(self, index: int, data: bytes) -> None:
        """The figures of API process ``index`` as they are now."""
        self._last[index] = added.unpacked(data)

    def ended(self, index: int) -> None:
        """That process has ended: what it counted until its last figures stays."""
        last = self._last.pop(index, [])
        self._ended = added.added([self._ended, added.lasting(last)])

    def text(self) -> bytes:
        """Prometheus' text format.

        Raises:
            Unavailable: no API process was up yet.
        """
        if self._metrics is None:
            raise Unavailable("The server starts.", retry_after=1)
        own = [added.of_metric(family) for family in self._metrics.registry.collect()]
        return added.text(added.added([own, self._ended, *self._last.values()]))

    def buckets(self) -> bytes:
        """The JSON of ``/buckets``.

        Raises:
            Unavailable: no API process was up yet.
        """
        if self._metrics is None:
            raise Unavailable("The server starts.", retry_after=1)
        shown: dict[str, Any] = shown_all(replicas(self._engine), self._metrics.books)
        return msgspec.json.encode(shown)
