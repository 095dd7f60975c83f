"""CPU seconds of a run: a line for each part of the tests, and a failed run where a part takes twice its budget.

Each process that runs tests (this one, or the workers of pytest-xdist) adds up, for every test file, the user and
system time of itself and of the children it has waited for. The rest, imports and collection, counts as the first part.
A whole run is judged: no paths, no ``-k``, the ini file's own ``-m``. TRENCADIS_TEST_CPU_BUDGET=warn judges aloud only.
``--cpu-json=FILE`` writes the seconds of every file and of every test, whatever ran.

The same work takes more CPU seconds on an older machine, and on one whose cores share their units with a busy
neighbour. A fixed piece of work is timed between tests all through the run, and a part may take more by its median.

The most memory of a process that runs tests is told too: fixtures that keep engines make it grow, and a run in one
process may have ``MOST_MEMORY``.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TRENCADIS_TEST_CPU_BUDGET"
COLLECTION = "(imports and collection)"
SLACK = 2.0
"""A run fails from this multiple of a budget on, on a machine as fast as the one that the budgets were measured on.
Below, it says so."""
PIECE_SECONDS = 0.014
"""CPU seconds of ``time_piece`` on that machine while both of its cores ran tests."""
PIECE_EVERY = 10.0
"""Seconds between two measurements of it."""

MOST_MEMORY = 3.0
"""GB of a process that runs all tests."""
PAGE = os.sysconf("SC_PAGE_SIZE")

Key = tuple[str, str]
"""Part and file."""


def cpu_seconds(children: bool = True) -> float:
    """User and system time of this process, and of the children that it has waited for."""
    now = os.times()
    return now.user + now.system + (now.children_user + now.children_system if children else 0.0)


def resident_gb() -> float:
    """Memory of this process in GB; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e9
    except OSError:
        return 0.0


def time_piece() -> float:
    """CPU seconds of a fixed piece of work: objects are made, written as JSON, read, sorted and added up."""
    begun, numbers = time.process_time(), random.Random(0)
    rows = [{"name": f"row {i * 7919 % 1009}", "values": [numbers.random() for _ in range(8)]} for i in range(1000)]
    read: list[dict[str, Any]] = json.loads(json.dumps(rows))
    sums: defaultdict[str, float] = defaultdict(float)
    for row in sorted(read, key=lambda row: str(row["name"])):
        sums[row["name"]] += sum(row["values"])
    return time.process_time() - begun


@dataclass(frozen=True)
class Part:
    """A part of the tests: patterns of its files, and the seconds they may take in all."""

    name: str
    seconds: float
    files: tuple[str, ...]


def read_parts(path: Path) -> list[Part]:
    """The parts of a budget file in its order; the first takes what no other claims."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Part(name, float(t["seconds"]), tuple(t.get("files", ()))) for name, t in tables.items()]


def part_of(file: str, mark: str | None, parts: list[Part]) -> str:
    """The part that a test's mark names, else the one whose patterns match its file, else the first."""
    names = [p.name for p in parts]
    if mark is not None:
        if mark not in names:
            raise pytest.UsageError(f"{file}: part {mark!r} is not in the budget file; known are {', '.join(names)}")
        return mark
    return next((p.name for p in parts if any(fnmatch(file, pattern) for pattern in p.files)), names[0])


class CpuBudget:
    """The seconds that this process measured, those that workers report, and the verdict."""

    def __init__(self, config: pytest.Config, parts: list[Part]) -> None:
        self.config, self.parts = config, parts
        self.spent: defaultdict[Key, float] = defaultdict(float)
        self.tests: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        """GB of the process after the last test of each file."""
        self.peaks: list[float] = []
        """The most of each process that ran tests."""
        self.pieces: list[float] = []
        """Results of ``time_piece``, here or in all workers."""
        self.next_piece = 0.0
        self.silent = 0
        self.ended = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Adds what the test and its fixtures take."""
        begun = cpu_seconds()
        try:
            return (yield)
        finally:
            file = item.nodeid.partition("::")[0]
            mark = item.get_closest_marker("part")
            taken = cpu_seconds() - begun
            self.tests[item.nodeid] = taken
            self.memory[file] = resident_gb()
            self.spent[part_of(file, mark.args[0] if mark else None, self.parts), file] += taken
            if (now := time.monotonic()) >= self.next_piece:
                self.pieces.append(time_piece())
                self.next_piece = now + PIECE_EVERY

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended; one that died reports nothing."""
        report = getattr(node, "workeroutput", {}).get("cpu_budget")
        if report is None:
            self.silent += 1
        for name, file, seconds in report or ():
            self.spent[name, file] += seconds
        self.tests |= getattr(node, "workeroutput", {}).get("cpu_tests", {})
        self.pieces += getattr(node, "workeroutput", {}).get("pieces", [])
        self._add_memory(getattr(node, "workeroutput", {}).get("memory", {}))

    def _add_memory(self, found: dict[str, float]) -> None:
        self.memory |= {file: max(size, self.memory.get(file, 0.0)) for file, size in found.items()}
        self.peaks += [max(found.values())] if found else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A worker reports; the process that started the run judges."""
        distributed = bool(getattr(self.config.option, "numprocesses", None))
        measured = 0.0 if distributed else sum(self.spent.values())
        self.spent[self.parts[0].name, COLLECTION] += max(cpu_seconds(children=not distributed) - measured, 0.0)
        output: dict[str, Any] | None = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["cpu_budget"] = [(*key, s) for key, s in self.spent.items()]
            output["cpu_tests"] = self.tests
            output["memory"] = self.memory
            output["pieces"] = self.pieces
            return
        if not distributed:
            self._add_memory(self.memory)
        self.ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self.judged and self.above(SLACK) and os.environ.get(VARIABLE) != "warn" and not exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def judged(self) -> bool:
        """A whole run that came to its end."""
        requested = self.config
        whole = requested.args_source is pytest.Config.ArgsSource.TESTPATHS
        chosen = requested.option.keyword or getattr(requested.option, "lf", False) or requested.option.collectonly
        marks = requested.option.markexpr == requested.getini("cpu_budget_markers")
        return self.ended and whole and marks and not chosen and not requested.option.deselect

    def totals(self) -> dict[str, float]:
        """Seconds of each part that has run."""
        found: defaultdict[str, float] = defaultdict(float)
        for (part, _), seconds in self.spent.items():
            found[part] += seconds
        return dict(found)

    @property
    def slowness(self) -> float:
        """CPU seconds that the piece of work took, as a multiple of ``PIECE_SECONDS``; at least 1."""
        return max(1.0, statistics.median(self.pieces) / PIECE_SECONDS) if self.pieces else 1.0

    def above(self, slack: float = 1.0) -> list[Part]:
        """The parts that took more than ``slack`` times what they may on this machine."""
        totals, slack = self.totals(), slack * self.slowness
        return [p for p in self.parts if totals.get(p.name, 0.0) > slack * p.seconds]

    def write(self, path: Path) -> None:
        """Seconds of each part, of each file by part, and of each test with its fixtures, the costliest first."""
        files: dict[str, dict[str, float]] = {p.name: {} for p in self.parts}
        for (part, file), seconds in sorted(self.spent.items(), key=lambda x: -x[1]):
            files[part][file] = round(seconds, 3)
        tests = {name: round(s, 3) for name, s in sorted(self.tests.items(), key=lambda x: -x[1])}
        found = {"parts": self.totals(), "files": files, "tests": tests, "memory": self.memory}
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each part of a whole run, and on request the files that took most."""
        count = self.config.getoption("--cpu-files")
        if self.judged:
            terminalreporter.section("CPU seconds")
            totals, above = self.totals(), self.above()
            for part in self.parts:
                if part.name in totals:
                    verdict = "ABOVE ITS BUDGET" if part in above else "ok"
                    line = f"{part.name}: {totals[part.name]:.1f} s of CPU, budget {part.seconds:.0f} s: {verdict}"
                    terminalreporter.write_line(line, red=part in above)
            terminalreporter.write_line(f"budgets times {self.slowness:.2f}: the speed of this machine during the run")
            if above:
                terminalreporter.write_line("--cpu-files 30 lists the files that take most; see tests/budget.toml")
            sizes = ", ".join(f"{size:.2f}" for size in self.peaks)
            terminalreporter.write_line(
                f"memory of each process that ran tests: {sizes} GB, one may have {MOST_MEMORY:.0f}",
                red=max(self.peaks, default=0.0) > MOST_MEMORY,
            )
        if count:
            terminalreporter.section(f"CPU seconds: the {count} files that took most")
            for (name, file), seconds in sorted(self.spent.items(), key=lambda x: -x[1])[:count]:
                terminalreporter.write_line(f"{seconds:8.2f} {name:10} {file}")
        if target := self.config.getoption("--cpu-json"):
            self.write(Path(target))
        if self.silent:
            terminalreporter.write_line(f"{self.silent} workers ended without a report of their CPU seconds.")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("cpu_budget", "the file with the CPU seconds that each part of the tests may take")
    parser.addini("cpu_budget_markers", "the -m of a whole run", default="")
    parser.addoption("--cpu-files", type=int, default=0, metavar="N", help="list the N files that took most CPU")
    parser.addoption("--cpu-json", metavar="FILE", help="write the CPU seconds of every file and test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "part(name): the part of the budget file that the test's CPU seconds count to")
    if config.getini("cpu_budget"):
        parts = read_parts(config.rootpath / config.getini("cpu_budget"))
        config.pluginmanager.register(CpuBudget(config, parts), "cpu_budget_of_this_run")
