"""Progress reports of start-up and warm-up. Torch-free."""

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
