"""Sleep state of one engine: awake, falling asleep, asleep or waking.

The states follow each other: awake, falling asleep (running requests finish), asleep (the process has ended), waking
(another process loads), awake.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from trencadis.core.process.engine_messages import EngineStats


class SleepState:
    """State machine of sleep mode for one engine. ``Supervisor`` changes the state; the events release waiting
    callers.
    """

    def __init__(self) -> None:
        self.level = 0
        """0: awake; else the requested level, until the engine has woken up."""
        self.asked_to_end = False
        """True once the engine was asked to end."""
        self.process_gone = asyncio.Event()
        """Set when the process has ended, or did not fall asleep at all."""
        self.wake_wanted = asyncio.Event()
        """Set when a wake-up is requested."""
        self.woken: asyncio.Future[bool] | None = None
        """Result of the wake-up: True if the engine is awake, False if it failed."""
        self.waiters = 0
        """Number of requests that wait for the engine."""
        self.on_operation: list[Callable[[str, float], None]] = []
        """Called with ``sleep`` or ``wake``, and the seconds that it took."""
        self._since = 0.0

    @property
    def operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        if not self.level:
            return ""
        if not self.process_gone.is_set():
            return "sleep"
        return "wake" if self.wake_wanted.is_set() else ""

    @property
    def is_asleep(self) -> bool:
        """True while asleep: the process has exited and no wake-up is pending."""
        return bool(self.level) and self.process_gone.is_set() and not self.wake_wanted.is_set()

    @property
    def phase(self) -> str:
        """The state in a word or two; empty: awake."""
        if not self.level:
            return ""
        return {"sleep": "falling asleep", "wake": "waking"}.get(self.operation, "asleep")

    def start_sleep(self, level: int) -> None:
        """Begins to fall asleep at ``level``."""
        self.level, self.asked_to_end = level, False
        self.process_gone.clear()
        self.wake_wanted.clear()
        self.woken = asyncio.get_running_loop().create_future()
        self._since = time.monotonic()

    def mark_asleep(self) -> None:
        """Marks that the process has ended."""
        self.process_gone.set()
        self._notify_operation("sleep")

    def request_wake(self) -> None:
        """Requests a wake-up; does nothing while awake or when one is pending."""
        if self.level and not self.wake_wanted.is_set():
            self.wake_wanted.set()
            if self.process_gone.is_set():
                self._since = time.monotonic()

    def mark_waking(self) -> None:
        """Restarts the clock of the wake-up when a new process is started."""
        self._since = time.monotonic()

    def finish_wake(self, well: bool) -> None:
        """Ends sleep mode, awake (``well``) or failed, and releases all waiters."""
        if not self.level:
            return
        self.level = 0
        if well:
            self._notify_operation("wake")
        else:
            self.asked_to_end = False
        self.process_gone.set()
        self.wake_wanted.set()
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(well)

    def adjust_stats(self, stats: EngineStats) -> EngineStats:
        """Returns ``stats`` corrected while no process runs: requests that wait for the engine count as waiting."""
        if not self.level or not self.process_gone.is_set():
            return stats
        waiting = self.waiters
        return dataclasses.replace(
            stats, running=0, waiting=waiting, deferred=waiting, kv_used=0, kv_cached=0, arena_used=0
        )

    def _notify_operation(self, operation: str) -> None:
        for observer in self.on_operation:
            observer(operation, time.monotonic() - self._since)
