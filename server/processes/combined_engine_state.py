"""State of several engines combined into one ``EngineClient`` view.

Combines counters of several engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from trencadis.core.process import engine_messages
from trencadis.core.process.engine_messages import EngineInfo, EngineStats, GraphCounters
from trencadis.server.engine.engine_client_and_request_timing import EngineClient

Number = TypeVar("Number", int, float)


def _sum_by_name(parts: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    """Returns the sums by name."""
    found: dict[str, Number] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found[name] + value if name in found else value
    return found


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums of counters and gauges. Lists, which contain only new entries, are left empty."""
    made = EngineStats()
    for one in dataclasses.fields(EngineStats):
        if isinstance(getattr(made, one.name), int):
            setattr(made, one.name, sum(getattr(s, one.name) for s in stats))
    warming = [s.graphs.warming for s in stats if s.graphs.warming is not None]
    made.graphs = GraphCounters(
        sum(s.graphs.lazy_compiles for s in stats),
        sum(s.graphs.recompiles for s in stats),
        _sum_by_name([s.graphs.bytes for s in stats]),
        min(warming, key=lambda w: w.fraction, default=None),
        _sum_by_name([s.graphs.capture_seconds for s in stats]),
        sum(s.graphs.graph_breaks for s in stats),
    )
    return made


def merge_infos(infos: Sequence[EngineInfo | None]) -> EngineInfo | None:
    """Merges the engine infos: smallest ``max_model_len``, sum of blocks; None until one engine is up."""
    known = [info for info in infos if info is not None]
    if not known:
        return None
    return dataclasses.replace(
        known[0],
        max_model_len=min(info.max_model_len for info in known),
        num_blocks=sum(info.num_blocks for info in known),
        arena_rows=sum(info.arena_rows for info in known),
        kv_bytes=sum(info.kv_bytes for info in known),
        arena_bytes=sum(info.arena_bytes for info in known),
    )


class GroupMember(EngineClient, Protocol):
    """Protocol of an engine that may be one of several."""

    @property
    def open_requests(self) -> int:
        """Number of requests in the engine, or on their way there."""
        ...

    @property
    def stopping(self) -> bool:
        """True if the server is ending."""
        ...


Member = TypeVar("Member", bound=GroupMember)


class EngineGroup(Generic[Member]):
    """Combined properties of several engines.

    Args:
        engines: at least one.
    """

    engines: Sequence[Member]

    @property
    def info(self) -> engine_messages.EngineInfo | None:
        """The combined report of all engines; None while the first one loads."""
        return merge_infos([e.info for e in self.engines])

    @property
    def phase(self) -> str:
        """The engines' common phase, or the number of engines in each phase."""
        phases = [e.phase for e in self.engines]
        if len(set(phases)) == 1:
            return phases[0]
        return ", ".join(f"{phases.count(p)} {p}" for p in dict.fromkeys(phases))

    @property
    def accepting(self) -> bool:
        """True if any engine would run a request submitted now."""
        return any(e.accepting for e in self.engines)

    @property
    def healthy(self) -> bool:
        """True if any engine runs and is not leaving."""
        return any(e.healthy for e in self.engines)

    @property
    def ready(self) -> bool:
        """True if every engine has come up once, and one accepts requests."""
        return all(e.info is not None for e in self.engines) and any(e.ready for e in self.engines)

    @property
    def failing(self) -> bool:
        """True if all engines fail repeatedly; as long as one serves, a restart of all is not worth it."""
        return all(e.failing for e in self.engines)

    @property
    def restarts(self) -> int:
        """Number of engines that failed and were replaced."""
        return sum(e.restarts for e in self.engines)

    @property
    def stats(self) -> engine_messages.EngineStats:
        """The sums of the last counters."""
        return sum_stats([e.stats for e in self.engines])

    @property
    def open_requests(self) -> int:
        """Number of requests in an engine, or on their way there."""
        return sum(e.open_requests for e in self.engines)

    @property
    def plan(self) -> engine_messages.GraphPlan | None:
        """The first engine's planned shapes; all engines have the same plan."""
        return self.engines[0].plan

    @property
    def progress(self) -> engine_messages.Phase | None:
        """Loading progress of the slowest engine that is still loading."""
        phases = [e.progress for e in self.engines if e.info is None and e.progress is not None]
        return min(phases, key=lambda p: p.fraction, default=self.engines[0].progress)

    @property
    def sleep_level(self) -> int:
        """The level at which all engines sleep; 0: one is awake."""
        return min(e.sleep_level for e in self.engines)

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs in any engine, else empty."""
        return next((e.sleep_operation for e in self.engines if e.sleep_operation), "")

    @property
    def stopping(self) -> bool:
        """True if the server is ending."""
        return any(e.stopping for e in self.engines)
