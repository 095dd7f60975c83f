"""Where an engine stands between awake and asleep, and who waits for it.

Awake, falling asleep (what runs is finished), asleep (its process is gone), waking (another one loads), awake.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from trencadis.core.process.wire import EngineStats


class Slumber:
    """The state of one engine. ``Supervisor`` moves it on; its events tell those who wait."""

    def __init__(self) -> None:
        self.level = 0
        """0: awake; else as asked for, until the engine has woken up."""
        self.told = False
        """The engine was told to end."""
        self.gone = asyncio.Event()
        """Its process has ended, or did not fall asleep at all."""
        self.wanted = asyncio.Event()
        """Somebody wants it awake."""
        self.woken: asyncio.Future[bool] | None = None
        """Whether it has woken up; false: it failed."""
        self.waiters = 0
        """Requests that wait for it."""
        self.on_operation: list[Callable[[str, float], None]] = []
        """Called with ``sleep`` or ``wake``, and the seconds that it took."""
        self._since = 0.0

    @property
    def under_way(self) -> str:
        """``sleep`` or ``wake`` while that goes on, else empty."""
        if not self.level:
            return ""
        if not self.gone.is_set():
            return "sleep"
        return "wake" if self.wanted.is_set() else ""

    @property
    def asleep(self) -> bool:
        """Whether its process is gone and nobody wants it back."""
        return bool(self.level) and self.gone.is_set() and not self.wanted.is_set()

    @property
    def phase(self) -> str:
        """In a word or two; empty: awake."""
        if not self.level:
            return ""
        return {"sleep": "falling asleep", "wake": "waking"}.get(self.under_way, "asleep")

    def begin(self, level: int) -> None:
        """It falls asleep."""
        self.level, self.told = level, False
        self.gone.clear()
        self.wanted.clear()
        self.woken = asyncio.get_running_loop().create_future()
        self._since = time.monotonic()

    def fell_asleep(self) -> None:
        """Its process is gone."""
        self.gone.set()
        self._ended("sleep")

    def want(self) -> None:
        """Somebody wants it awake."""
        if self.level and not self.wanted.is_set():
            self.wanted.set()
            if self.gone.is_set():
                self._since = time.monotonic()

    def waking(self) -> None:
        """Another process starts."""
        self._since = time.monotonic()

    def end(self, well: bool) -> None:
        """It is awake, or could not be woken: whoever waits goes on."""
        if not self.level:
            return
        self.level = 0
        if well:
            self._ended("wake")
        else:
            self.told = False
        self.gone.set()
        self.wanted.set()
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(well)

    def shown(self, stats: EngineStats) -> EngineStats:
        """Counters as they are while nothing runs: requests that wait for it wait in its queue."""
        if not self.level or not self.gone.is_set():
            return stats
        waiting = self.waiters
        return dataclasses.replace(
            stats, running=0, waiting=waiting, deferred=waiting, kv_used=0, kv_cached=0, arena_used=0
        )

    def _ended(self, operation: str) -> None:
        for observer in self.on_operation:
            observer(operation, time.monotonic() - self._since)
