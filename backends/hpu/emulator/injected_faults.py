"""Faults that tests inject into the emulated device: errors and deaths at a numbered capture, step or graph."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from trencadis.backends.hpu.emulator.emulated_errors import EmulatedOutOfMemory
from trencadis.core.errors import StartupError

ENTRY = re.compile(r"(oom|late|crash|fail)@(capture|step|compile|graph):(\d+)|return:([01](?:\.\d+)?)")
GRAPH_FAILED = "Graph compile failed. synStatus=synStatus 26 [Generic failure]."
LOWERING_FAILED = f"[Rank:0] FATAL ERROR :: MODULE:PT_BRIDGE Exception in Lowering thread...\n{GRAPH_FAILED}"
"""The same from the thread that compiles, raised by a later call."""


@dataclass
class EmulatedFaults:
    """Faults of one device. Captures and steps are counted from 1; a step is one run or replay.

    Args:
        out_of_memory: (kind, number) pairs that run out of memory; kind is ``capture`` or ``step``.
        late: (kind, number) pairs whose workspace fails in the thread that launches recipes, or whose ``graph`` fails
            in the thread that compiles: the error is raised by a later call that waits.
        failing: (kind, number) pairs at which the graph compiler fails; ``compile`` counts launches in compile-only
            mode, ``graph`` the graphs of compile mode, each of whose launches fails.
        crash: (kind, number) pairs at which the process dies.
        returned: share of a graph's bytes that its release gives back.
    """

    out_of_memory: set[tuple[str, int]] = field(default_factory=set)
    late: set[tuple[str, int]] = field(default_factory=set)
    failing: set[tuple[str, int]] = field(default_factory=set)
    crash: set[tuple[str, int]] = field(default_factory=set)
    returned: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    pending: list[Exception] = field(default_factory=list)
    """Errors of launches that no call has raised yet."""

    def next(self, kind: str) -> None:
        """Makes the next ``kind`` run out of memory."""
        self.out_of_memory.add((kind, self.counts.get(kind, 0) + 1))

    def check_graph(self) -> Callable[[], None]:
        """Counts a graph of compile mode.

        Returns:
            What each of its launches calls: it fails if that was requested.
        """
        number = self.counts["graph"] = self.counts.get("graph", 0) + 1

        def launch() -> None:
            if ("graph", number) in self.failing:
                raise RuntimeError(GRAPH_FAILED)
            if ("graph", number) in self.late:
                self.pending.append(RuntimeError(LOWERING_FAILED))

        return launch

    def reach(self, kind: str, free: int) -> None:
        """Counts a ``kind`` and fails it if a fault was requested for that number."""
        number = self.counts[kind] = self.counts.get(kind, 0) + 1
        if (kind, number) in self.crash:
            os.kill(os.getpid(), signal.SIGKILL)
        if (kind, number) in self.out_of_memory:
            raise EmulatedOutOfMemory(free + 1, free, f"{kind} {number} (injected)", workspace=kind == "step")
        if (kind, number) in self.failing:
            raise RuntimeError(GRAPH_FAILED)
        if (kind, number) in self.late:
            text = f"{kind} {number} (injected, late)"
            self.pending.append(EmulatedOutOfMemory(free + 1, free, text, workspace=True))


def parse(text: str) -> EmulatedFaults:
    """Parses faults such as ``oom@capture:3,crash@capture:2,oom@step:10,return:0.5``."""
    faults = EmulatedFaults()
    for entry in filter(None, (e.strip() for e in text.split(","))):
        found = ENTRY.fullmatch(entry)
        if found is None:
            raise StartupError(
                f"TRENCADIS_HPU_EMULATOR_FAULTS: {entry!r} is none of oom@capture:N, oom@step:N, late@capture:N, "
                "late@step:N, late@graph:N, fail@compile:N, fail@graph:N, crash@capture:N, crash@step:N, return:SHARE"
            )
        what, kind, number, share = found.groups()
        if share is not None:
            faults.returned = float(share)
        else:
            {"oom": faults.out_of_memory, "late": faults.late, "fail": faults.failing, "crash": faults.crash}[what].add(
                (kind, int(number))
            )
    return faults
