"""Errors of the emulated device, each with the operation, the remedy and the line of code; and faults to inject."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trencadis.core.errors import StartupError

OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<frozen")
"""Path prefixes of files whose lines are skipped when the cause is searched: the emulator's and torch's."""


def line_of_code() -> str:
    """Returns ``file:line`` of the innermost frame that belongs to neither the emulator nor torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


class Refused(RuntimeError):
    """An operation that a device program must not do.

    Args:
        op: the operation's name.
        why: what is wrong with it on the device.
        remedy: what to do instead.
        line: the line of code; None: the line that runs now.
    """

    def __init__(self, op: str, why: str, remedy: str, line: str | None = None) -> None:
        self.op, self.why, self.remedy, self.line = op, why, remedy, line or line_of_code()
        super().__init__(f"{op}: {why}; {remedy} ({self.line})")

    def at(self, line: str) -> Refused:
        """Returns the same error with the line of code that was captured."""
        return Refused(self.op, self.why, self.remedy, line)


class EmulatedOutOfMemory(RuntimeError):
    """The emulated device has no memory left, or none in one piece (``largest``: bytes of the largest).

    The text is the plug-in's for the place: that of the workspace differs from that of tensors and graphs.
    """

    def __init__(
        self, wanted: int, free: int, what: str, largest: int | None = None, workspace: bool = False
    ) -> None:  # fmt: skip
        split = f", the largest piece of them {largest}" if largest is not None and wanted <= free else ""
        place = f"MODULE:PT_SYNHELPER workspace Allocation of size ::{wanted} failed!" if workspace else (
            f"MODULE:PT_DEVMEM Allocation failed for size::{wanted} ({wanted / (1 << 20):.6g})MB"
        )  # fmt: skip
        super().__init__(f"FATAL ERROR :: {place} (hpu, emulated: {what}; {free} are free{split})")
        self.wanted, self.free = wanted, free


def missing_type(dtype: torch.dtype) -> Refused:
    return Refused("a tensor", f"is {str(dtype).removeprefix('torch.')}, which the card has not", "use another type")


def fallback_in_capture(op: str, why: str) -> Refused:
    return Refused(
        op, f"runs on the host's CPU ({why}) inside a capture, at {line_of_code()}", "use an operation of the list"
    )


def host_read(op: str) -> Refused:
    return Refused(op, "reads a device value on the host", "keep it in a tensor, or use .cpu() between launches")


def host_read_inside(op: str) -> Refused:
    return Refused(op, "copies to the host inside a launch", "end the launch first; outputs are fetched after it")


def host_mixed(op: str) -> Refused:
    return Refused(op, "mixes a host tensor with device tensors", "make it an input of the program, or copy it before")


def host_values(op: str) -> Refused:
    return Refused(
        op,
        "builds a device tensor from host values inside a body",
        "a graph would repeat today's values: pass it as an input",
    )


def dynamic_shape(op: str) -> Refused:
    return Refused(op, "has a shape that depends on values", "use torch.where, a finite mask or indices from the host")


def boolean_mask(op: str) -> Refused:
    return Refused(op, "indexes by a boolean mask", "use torch.where, or integer indices made on the host")


def view_update(op: str) -> Refused:
    return Refused(
        op, "updates a view inside a capture", "update the base tensor: index_copy_ or index_put_, or torch.cat"
    )


def new_version(op: str) -> Refused:
    return Refused(
        op,
        "writes to a view between launches, which makes another version of its tensor: graphs read the old one",
        "write the whole tensor, or let a launch do it: index_copy_ on the tensor itself",
    )


def too_many_ops(count: int, limit: int) -> Refused:
    return Refused("cut", f"{count} operations without a graph cut (limit {limit})", 'call ops.cut("layer") more often')


def resized_tensor(op: str) -> Refused:
    return Refused(op, "makes a tensor of another size outside a launch", "make it on the host and copy it with .to()")


def no_hccl_memory(op: str) -> Refused:
    return Refused(
        op, "finds no memory for HCCL's buffers: the pool has all of it", "name the ranks in WORLD_SIZE at opening"
    )


def no_values(op: str) -> Refused:
    return Refused(op, "uses a result of a compile-only launch, which has no values", "run the program outside warm-up")


def negative_index(op: str) -> Refused:
    return Refused(op, "an index is outside its tensor (-1 included)", "padding must point at a reserved row or block")


def mask_too_large(op: str, count: int) -> Refused:
    return Refused(op, f"a mask of {count} bytes a head makes NaN beyond 2^31", "attend to fewer queries at a time")


def causal_statistics(queries: int, keys: int, step: int) -> Refused:
    return Refused(
        "sdpa_recomp_fwd",
        f"a causal call of {queries} x {keys} gives wrong statistics",
        f"take multiples of {step}, or a mask",
    )


def too_wide(op: str, value: int) -> Refused:
    return Refused(
        op, f"makes the whole number {value}, of which the card keeps 32 bits", "keep values and indices below 2^31"
    )


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
