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


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    yield Metric(name)
