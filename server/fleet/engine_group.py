"""State of several engines combined into one ``EngineClient`` view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from trencadis.core.process import engine_messages
from trencadis.server.engine.engine_client import EngineClient
from trencadis.server.fleet import aggregate_stats


class GroupMember(EngineClient, Protocol):
    """An engine that may be one of several."""

    @property
    def open_requests(self) -> int:
        """Requests in the engine, or on their way there."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the server ends."""
        ...


Member = TypeVar("Member", bound=GroupMember)


class EngineGroup(Generic[Member]):
    """The readings of several engines, joined.

    Args:
        engines: at least one.
    """

    engines: Sequence[Member]

    @property
    def info(self) -> engine_messages.EngineInfo | None:
        """What all engines offer together; None while the first one loads."""
        return aggregate_stats.merge_infos([e.info for e in self.engines])

    @property
    def phase(self) -> str:
        """The engines' phase where it is one, else how many are in which."""
        phases = [e.phase for e in self.engines]
        if len(set(phases)) == 1:
            return phases[0]
        return ", ".join(f"{phases.count(p)} {p}" for p in dict.fromkeys(phases))

    @property
    def accepting(self) -> bool:
        """Whether any engine would run a request submitted now."""
        return any(e.accepting for e in self.engines)

    @property
    def healthy(self) -> bool:
        """Whether any engine runs and is to stay."""
        return any(e.healthy for e in self.engines)

    @property
    def ready(self) -> bool:
        """Whether every engine has come up once, and one takes requests."""
        return all(e.info is not None for e in self.engines) and any(e.ready for e in self.engines)

    @property
    def failing(self) -> bool:
        """Whether all engines fail again and again; one that serves is worth more than a restart of all."""
        return all(e.failing for e in self.engines)

    @property
    def restarts(self) -> int:
        """Engines that failed and were replaced."""
        return sum(e.restarts for e in self.engines)

    @property
    def stats(self) -> engine_messages.EngineStats:
        """The sums of the last counters."""
        return aggregate_stats.sum_stats([e.stats for e in self.engines])

    @property
    def open_requests(self) -> int:
        """Requests in an engine, or on their way there."""
        return sum(e.open_requests for e in self.engines)

    @property
    def plan(self) -> engine_messages.GraphPlan | None:
        """The first engine's planned shapes; all plan alike."""
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
        """``sleep`` or ``wake`` while that goes on anywhere, else empty."""
        return next((e.sleep_operation for e in self.engines if e.sleep_operation), "")

    @property
    def stopping(self) -> bool:
        """Whether the server ends."""
        return any(e.stopping for e in self.engines)
