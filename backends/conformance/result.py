"""What a check says: pass, fail or skip, with a reason and a figure; and all of them as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, SKIP = "pass", "fail", "skip"


class CheckFailed(Exception):
    """The backend breaks what the check asks; the message says how."""


class Skipped(Exception):
    """The check does not apply; the message says why."""


@dataclass(frozen=True)
class Result:
    """One check. ``figure`` is what was measured, ``reason`` why it failed or was skipped."""

    name: str
    status: str
    asks: str
    figure: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All checks of one backend.

    Args:
        label: what the backend calls its device.
        inherited: ops that are the reference's own.
    """

    backend: str
    label: str
    dtype: str
    inherited: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    results: list[Result] = field(default_factory=list)

    def count(self, status: str) -> int:
        """How many checks ended so."""
        return sum(r.status == status for r in self.results)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.count(FAIL) == 0

    def failures(self) -> list[str]:
        """Names of the checks that failed."""
        return [r.name for r in self.results if r.status == FAIL]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "passed": self.passed}

    def summary(self) -> str:
        """The last line."""
        words = ((PASS, "passed"), (FAIL, "failed"), (SKIP, "skipped"))
        counts = ", ".join(f"{self.count(status)} {word}" for status, word in words)
        return f"{self.backend}: {counts}; {sum(r.seconds for r in self.results):.1f} s"


def line(result: Result) -> str:
    """One check as text."""
    said = result.reason if result.status != PASS else result.figure
    return f"{result.status:4}  {result.name:24} {said or result.asks}"
