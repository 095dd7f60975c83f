"""Faults to inject, so that recovery from failures can be tested."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field

from trencadis.backends.hpu.emulator.refusals import EmulatedOutOfMemory
from trencadis.core.errors import StartupError

ENTRY = re.compile(r"(oom|late|crash|fail)@(capture|step|compile):(\d+)|return:([01](?:\.\d+)?)")


@dataclass
class EmulatedFaults:
    """Faults of one device. Captures and steps are counted from 1; a step is one run or replay.

    Args:
        out_of_memory: (kind, number) pairs that run out of memory; kind is ``capture`` or ``step``.
        late: (kind, number) pairs whose workspace fails in the thread that launches recipes: the error is raised by a
            later call that waits.
        failing: (kind, number) pairs at which the graph compiler fails; ``compile`` counts launches in compile-only
            mode.
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

    def reach(self, kind: str, free: int) -> None:
        """Counts a ``kind`` and fails it if a fault was requested for that number."""
        number = self.counts[kind] = self.counts.get(kind, 0) + 1
        if (kind, number) in self.crash:
            os.kill(os.getpid(), signal.SIGKILL)
        if (kind, number) in self.out_of_memory:
            raise EmulatedOutOfMemory(free + 1, free, f"{kind} {number} (injected)", workspace=kind == "step")
        if (kind, number) in self.failing:
            raise RuntimeError("synStatus=26 [Generic failure] Graph compile failed.")
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
                "late@step:N, fail@compile:N, crash@capture:N, crash@step:N, return:SHARE"
            )
        what, kind, number, share = found.groups()
        if share is not None:
            faults.returned = float(share)
        else:
            {"oom": faults.out_of_memory, "late": faults.late, "fail": faults.failing, "crash": faults.crash}[what].add(
                (kind, int(number))
            )
    return faults
