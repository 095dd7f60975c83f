from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Metric:
    def stats(self) -> list[tuple[str, float]]:
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0)]


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    yield Metric()
