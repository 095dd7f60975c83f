"""Virtual compile time: recipes by content, and the seconds that a device's compiler would have spent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from trencadis.backends.hpu.emulator.profiles import Profile


class Metric:
    """What ``metric_localcontext`` yields: events of one kind while it is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seconds = 0.0

    def stats(self) -> list[tuple[str, float]]:
        """As the bridge reports them: entry 0 is the number of events."""
        mean = self.seconds / self.count if self.count else 0
        return [("TotalNumber", self.count), ("TotalTime", int(self.seconds * 1e6)), ("AvgTime", mean * 1e6)]


class Clock:
    """Recipes that were compiled, and the virtual seconds so far."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.seconds = 0.0
        self.compiles = 0
        self._recipes: set[Hashable] = set()
        self._open: list[Metric] = []

    def recipe(self, key: Hashable, ops: int) -> bool:
        """Runs a recipe of ``ops`` operations; True where it had to be compiled first."""
        if key in self._recipes:
            return False
        self._recipes.add(key)
        spent = self.profile.compile_base + ops * self.profile.compile_per_op
        self.seconds += spent
        self.compiles += 1
        for metric in self._open:
            if metric.name == "graph_compilation":
                metric.count += 1
                metric.seconds += spent
        return True

    @contextmanager
    def metric(self, name: str) -> Iterator[Metric]:
        """Counts events called ``name`` until the block ends."""
        found = Metric(name)
        self._open.append(found)
        try:
            yield found
        finally:
            self._open.remove(found)
