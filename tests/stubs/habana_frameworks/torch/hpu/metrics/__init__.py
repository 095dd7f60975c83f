from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TOTALS: Counter[str] = Counter()
FALLBACKS: Counter[str] = Counter()


class Metric:
    """Counts events from its making on."""

    def __init__(self, name: str) -> None:
        self.name, self.before, self.ops = name, TOTALS[name], Counter(FALLBACKS)

    def stats(self) -> list[tuple[str, Any]]:
        count = TOTALS[self.name] - self.before
        if self.name == "cpu_fallback":
            return [("TotalNumber", count), ("FallbackOps", dict(FALLBACKS - self.ops))]
        return [("TotalNumber", count), ("TotalTime", 1000 * count), ("AvgTime", 1000 if count else 0)]


NAMES = ("graph_compilation", "cpu_fallback", "memory_defragmentation")


class MetricNotFound(Exception):
    """The plug-in has no metric of that name."""


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    if name not in NAMES:
        raise MetricNotFound(f"Metric with given name ({name}) doesn't exist.")
    yield Metric(name)
