"""Progress reports of start-up and warm-up, and the time that background warm-up may take. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """Called when a phase begins and during it: ``fraction`` or ``done`` of ``total``, ``eta`` in seconds."""

    def __call__(
        self, name: str, detail: str = "", fraction: float = 0.0, done: int = 0, total: int = 0, eta: float = 0.0
    ) -> None: ...

    def capture(self, bucket: str, begun: bool) -> None:
        """Reports that the capture of ``bucket`` begins or has ended."""
        ...

    def enter(self, phase: str) -> str:
        """Sets the phase that health checks report; returns the previous one."""
        ...


class SilentProgress:
    """A Progress that reports nothing."""

    def __call__(
        self, name: str, detail: str = "", fraction: float = 0.0, done: int = 0, total: int = 0, eta: float = 0.0
    ) -> None:
        pass

    def capture(self, bucket: str, begun: bool) -> None:
        pass

    def enter(self, phase: str) -> str:
        return ""


@dataclass(slots=True)
class Warming:
    """Progress of warm-up: phase, ``done`` of ``total`` units, seconds left (``eta``), seconds spent."""

    phase: str = "planned"
    done: int = 0
    total: int = 0
    eta: float = 0.0
    seconds: float = 0.0
    last: str = ""

    @property
    def fraction(self) -> float:
        """Fraction of units that are done."""
        return self.done / self.total if self.total else 1.0


class Throttle:
    """Forwards a report when a phase changes or ends, otherwise at most once in ``seconds``."""

    def __init__(self, tell: Progress, seconds: float = 1.0) -> None:
        self._report, self._seconds = tell, seconds
        self._phase, self._at = "", 0.0

    def __call__(self, state: Warming) -> None:
        now = time.monotonic()
        if state.phase == self._phase and state.done < state.total and now - self._at < self._seconds:
            return
        self._phase, self._at = state.phase, now
        detail = f"{state.done} of {state.total}, {state.last}" if state.last else f"{state.done} of {state.total}"
        if state.eta >= 1:
            detail += f", about {state.eta:.0f} s left,"
        self._report(state.phase, detail, state.fraction, state.done, state.total, state.eta)


class WarmupPacing:
    """Allows background warm-up while its share of the time under load, including the next unit, is below ``stall``.

    Args:
        stall: fraction of wall time; 0: warm-up runs only while there are no requests.
        slice: seconds of units between two steps; 0: one unit. A unit cannot be interrupted, so a pause lasts this
            long, or as long as one compilation.
    """

    def __init__(self, stall: float, slice: float = 0.0) -> None:
        self.stall, self.slice = stall, slice
        self.spent = 0.0
        self.loaded = 0.0
        self.longest = 0.0

    def add_loaded_time(self, seconds: float) -> None:
        """Adds time that passed with requests in the engine, warm-up included."""
        self.loaded += seconds

    def allows(self, loaded: bool) -> bool:
        """Returns True if one more unit may run now; it is assumed to take as long as the longest so far."""
        return not loaded or self.spent + self.longest < self.stall * self.loaded

    def allows_another(self, paused: float, loaded: bool) -> bool:
        """Returns True if one more unit fits in a pause that has lasted ``paused`` seconds."""
        return paused + self.longest <= self.slice and self.allows(loaded)

    def add_work(self, seconds: float, loaded: bool) -> None:
        """Adds a unit of warm-up that took ``seconds``."""
        self.longest = max(0.9 * self.longest, seconds)
        if loaded:
            self.spent += seconds
