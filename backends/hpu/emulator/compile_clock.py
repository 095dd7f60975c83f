"""Virtual compile time: recipes by content, and the seconds that a device's compiler would have spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from trencadis.backends.hpu.emulator.card_profiles import Profile
from trencadis.backends.hpu.emulator.recipes.recipe_store import SavedRecipes

METRICS = ("graph_compilation", "cpu_fallback", "memory_defragmentation")
"""Names that ``metric_localcontext`` accepts."""


class MetricNotFound(Exception):
    """The plug-in has no metric of that name."""


class Metric:
    """The object that ``metric_localcontext`` yields: events of one kind while it is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seconds = 0.0

    def stats(self) -> list[tuple[str, float]]:
        """Returns (name, value) pairs as the bridge reports them: entry 0 is the number of events."""
        mean = self.seconds / self.count if self.count else 0
        return [("TotalNumber", self.count), ("TotalTime", int(self.seconds * 1e6)), ("AvgTime", mean * 1e6)]


class Clock:
    """Recipes that were compiled, and the virtual seconds so far."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.seconds = 0.0
        self.compiles = 0
        self.lines: Counter[str] = Counter()
        """Events other than compilations, such as fall-backs, by name, operation and line of code."""
        self.flavours = 0
        """Executables of compiled graphs: one for each combination of offsets of its inputs in their storages."""
        self._flavours: set[Hashable] = set()
        self.written_anew = 0
        """Bytes of whole tensors that compiled graphs rewrote in order to change a part of them."""
        self.saved: SavedRecipes | None = None
        self._recipes: set[Hashable] = set()
        self._open: list[Metric] = []

    def run_recipe(self, key: Hashable, ops: int) -> bool:
        """Runs a recipe of ``ops`` operations; returns True if it had to be compiled first."""
        if key in self._recipes:
            return False
        self._recipes.add(key)
        if self.saved is not None and self.saved.has(key):
            return False
        spent = self.profile.compile_base + ops * self.profile.compile_per_op
        self.seconds += spent
        self.compiles += 1
        for metric in self._open:
            if metric.name == "graph_compilation":
                metric.count += 1
                metric.seconds += spent
        if self.saved is not None:
            self.saved.keep(key, ops)
        return True

    def run_flavour(self, key: Hashable) -> bool:
        """Runs a compiled graph with inputs at certain offsets; returns True if it had no executable for them."""
        if key in self._flavours:
            return False
        self._flavours.add(key)
        self.flavours += 1
        return True

    def count_event(self, name: str, line: str) -> None:
        """Counts an event of the metric ``name``; ``line`` names the operation and the line of code."""
        self.lines[f"{name}: {line}"] += 1
        for metric in self._open:
            metric.count += metric.name == name

    def charge_copy(self, count: int) -> None:
        """Charges the rewriting of a whole tensor of ``count`` bytes, which is read and written once."""
        self.written_anew += count
        self.add_seconds(2 * count / self.profile.bandwidth)

    def add_seconds(self, seconds: float) -> None:
        """Adds virtual time that is not compile time."""
        self.seconds += seconds

    @contextmanager
    def metric(self, name: str) -> Iterator[Metric]:
        """Counts events called ``name`` until the block ends.

        Raises:
            MetricNotFound: for a name that the plug-in has no metric of.
        """
        if name not in METRICS:
            raise MetricNotFound(f"Metric with given name ({name}) doesn't exist.")
        found = Metric(name)
        self._open.append(found)
        try:
            yield found
        finally:
            self._open.remove(found)
