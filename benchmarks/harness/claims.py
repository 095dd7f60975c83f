"""Claims about a device with their bars, and how a run's figures are judged. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Claim:
    """One line of docs/hardware.md.

    Args:
        part: the part of ``program`` that measures it.
        bar: the value that passes, at least (``floor``) or at most.
        unit: after the value, e.g. ``x`` or ``%``.
        program: the module that measures it.
    """

    id: str
    part: str
    text: str
    bar: float
    floor: bool = False
    unit: str = ""
    program: str = "benchmarks.gpu"

    def passed(self, value: float) -> bool:
        """Whether ``value`` clears the bar."""
        return value >= self.bar if self.floor else value <= self.bar

    @property
    def wanted(self) -> str:
        """The bar, as text."""
        return f"{'at least' if self.floor else 'at most'} {self.bar:g}{self.unit}"

    @property
    def command(self) -> str:
        """The command that measures it."""
        return f"{command_of(self.program)} --only {self.part}"


def command_of(program: str) -> str:
    """How ``program`` is run from a checkout."""
    return f"PYTHONPATH=$PWD python -P -m {program}"


def judge(
    claims: Iterable[Claim], values: Mapping[str, float], notes: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Each measured claim with its value, whether it passes, and a note."""
    reported = notes or {}
    return {
        c.id: {"value": values[c.id], "passed": c.passed(values[c.id]), "note": reported.get(c.id, "")}
        for c in claims
        if c.id in values
    }
