"""Results of checks (pass, fail or skip, with a figure or a reason) and the report of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from trencadis.core.json_types import JsonObject

PASS, FAIL, SKIP = "pass", "fail", "skip"


class CheckFailed(Exception):
    """The backend breaks the rule that the check tests; the message says how."""


class Skipped(Exception):
    """The check does not apply; the message says why."""


@dataclass(frozen=True)
class Result:
    """Result of one check.

    Args:
        asks: the rule that it tests, from the check's docstring.
        figure: the measured value.
        reason: why it failed or was skipped.
    """

    name: str
    status: str
    asks: str
    figure: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """Results of all checks of one backend.

    Args:
        label: the backend's name for its device.
        inherited: ops that it inherits from ReferenceOps unchanged.
        notes: notes of the backend, for the reader.
    """

    backend: str
    label: str
    dtype: str
    inherited: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    results: list[Result] = field(default_factory=list)

    def count(self, status: str) -> int:
        """Returns how many checks have this status."""
        return sum(r.status == status for r in self.results)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return self.count(FAIL) == 0

    def failures(self) -> list[str]:
        """Returns the names of the checks that failed."""
        return [r.name for r in self.results if r.status == FAIL]

    def as_dict(self) -> JsonObject:
        """Returns the report as a dict for ``--json``."""
        return {**asdict(self), "passed": self.passed}

    def summary(self) -> str:
        """Returns the last line that is printed: counts and seconds."""
        words = ((PASS, "passed"), (FAIL, "failed"), (SKIP, "skipped"))
        counts = ", ".join(f"{self.count(status)} {word}" for status, word in words)
        return f"{self.backend}: {counts}; {sum(r.seconds for r in self.results):.1f} s"


def line(result: Result) -> str:
    """Formats one check as a line of text."""
    detail = result.reason if result.status != PASS else result.figure
    return f"{result.status:4}  {result.name:24} {detail or result.asks}"
