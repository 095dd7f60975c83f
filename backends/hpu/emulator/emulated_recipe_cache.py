"""The emulated recipe cache: virtual compile time, recipes by content, and their files on disk.

The folder is that of ``PT_HPU_RECIPE_CACHE_CONFIG``. Any fault of the files is one warning and a new compilation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trencadis.backends.hpu.emulator.card_profiles_and_op_support import Profile
from trencadis.core.errors import StartupError

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
YES, NO = ("true", "1"), ("false", "0", "")
FIELDS = 3


@dataclass(frozen=True)
class RecipeCacheConfig:
    """The values of the variable.

    Args:
        folder: where recipes are stored; None: nowhere.
        clear: True if the folder is emptied at start.
        megabytes: maximum size of the folder; 0: no limit.
    """

    folder: Path | None
    clear: bool = False
    megabytes: int = 0


def read(environ: Mapping[str, str]) -> RecipeCacheConfig:
    """Parses the variable; without it there is no cache.

    Raises:
        StartupError: the value cannot be parsed; one line.
    """
    text = environ.get(VARIABLE, "")
    path, clear, size = ([f.strip() for f in text.split(",")] + ["", "", ""])[:FIELDS]
    if clear.lower() not in YES + NO or not (size or "0").isdigit():
        raise StartupError(f"{VARIABLE}={text!r} is no FOLDER,DELETE,MEGABYTES, such as /var/recipes,false,16384.")
    return RecipeCacheConfig(Path(path) if path else None, clear.lower() in YES, int(size or 0))


log = logging.getLogger("trencadis.engine")

SUFFIX = ".emulated"

OP_BYTES = 4096
"""Size in bytes that one operation of a recipe counts for: the file holds only the number of operations."""


class SavedRecipes:
    """Recipes of earlier starts.

    Args:
        version: release and card; recipes of another version are compiled again.
    """

    def __init__(self, config: RecipeCacheConfig, version: str) -> None:
        assert config.folder is not None
        self.folder, self.version = config.folder, version
        self.limit = config.megabytes << 20
        self.hits = 0
        self._writes = True
        self._held = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"*{SUFFIX}") if config.clear else ():
                path.unlink()
            self._held = sum(self._size(p) for p in self.folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            self._stop(error)

    def has(self, key: Hashable) -> bool:
        """Returns True if the folder holds the recipe; a damaged file is reported, and compiled again by the caller."""
        path = self._path(key)
        try:
            found = json.loads(path.read_bytes())
            whole = bool(found["sum"] == self._sum(path.stem, found["ops"]))
        except OSError:
            return False
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            log.warning("recipe %s is damaged: it is compiled again and replaced", path)
        self.hits += whole
        return whole

    def keep(self, key: Hashable, ops: int) -> None:
        """Stores a compiled recipe. If the folder cannot be written, one warning is logged and nothing more is
        stored.
        """
        if not self._writes:
            return
        path = self._path(key)
        text = json.dumps({"ops": ops, "sum": self._sum(path.stem, ops)})
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True) if part.exists() else None
            self._stop(error)
            return
        self._held += ops * OP_BYTES
        if self.limit and self._held > self.limit:
            self._shrink()

    def _shrink(self) -> None:
        """Removes the oldest recipes until the folder is within its limit."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda p: p.stat().st_mtime_ns):
            if self._held <= self.limit:
                return
            self._held -= self._size(path)
            path.unlink(missing_ok=True)

    def _stop(self, error: OSError) -> None:
        self._writes = False
        log.warning(
            "%s: no recipe is kept in %s (%s): the next start compiles again; name a folder with room in %s",
            VARIABLE, self.folder, error.strerror or error, VARIABLE,
        )  # fmt: skip

    def _path(self, key: Hashable) -> Path:
        name = hashlib.sha256(f"{self.version}|{key!r}".encode()).hexdigest()
        return self.folder / f"{name}{SUFFIX}"

    def _sum(self, name: str, ops: int) -> str:
        return hashlib.sha256(f"{name}|{ops}".encode()).hexdigest()

    def _size(self, path: Path) -> int:
        try:
            return int(json.loads(path.read_bytes())["ops"]) * OP_BYTES
        except (OSError, ValueError, KeyError, TypeError):
            return 0


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


class LaunchRates(NamedTuple):
    """Seconds that the virtual clock advances for each launch, operation, multiplication and byte moved."""

    launch: float = 2e-5
    operation: float = 1e-6
    product: float = 5e-15
    byte: float = 8e-13

    def seconds(self, work: LaunchCounts) -> float:
        """Returns the seconds of a launch."""
        return self.launch + work.ops * self.operation + work.products * self.product + work.bytes * self.byte


class LaunchCounts(NamedTuple):
    """Operations of a launch, multiplications of its matrix products, and bytes that its operations read and write."""

    ops: int
    products: int
    bytes: int


class Clock:
    """Recipes that were compiled, and the virtual seconds so far."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.rates = LaunchRates()
        self.launched = 0.0
        """Virtual seconds of all launches, apart from ``seconds``."""
        self.seconds = 0.0
        self.compiles = 0
        self.between = 0
        """Operations outside of launches, each of which is a launch of its own."""
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

    def run_alone(self, key: Hashable | None) -> None:
        """Runs one operation outside of launches, which costs the host and the card a launch of its own.

        ``key``: its recipe; None: it has none, because it only fills new memory or is an eager kernel.
        """
        self.between += 1
        self.launched += self.rates.launch
        if key is not None:
            self.run_recipe(key, 1)

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
