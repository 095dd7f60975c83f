"""Devices that can be emulated, as data: memory and times of a card, and the operations that a release runs on it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trencadis.core.errors import StartupError
from trencadis.core.memory.memory_estimator import GRAPH

GIB = 1 << 30


@dataclass(frozen=True)
class Profile:
    """One kind of card.

    Args:
        total: bytes of memory that the plug-in finds on it.
        moves: True if memory is defragmented when a request finds no hole.
        graph_bytes: bytes of a graph besides its outputs and the tensors that it keeps.
        compile_base: virtual seconds to compile a recipe; an estimate, no measurement.
        compile_per_op: virtual seconds more for each operation in it; an estimate, no measurement.
        max_ops: operations between two cuts above which compilation is refused.
        block_softmax: True if its plug-in has the kernel that joins blocks of a decoding row.
        fp8_top: the largest e4m3 float of 8 bits.
        column: the card's column of dtypes in the tables of operations.
        bandwidth: bytes of memory a second, of its data sheet.
        host_copy: bytes a second to the host and back, an estimate; the cost of an operation on the host's CPU.
    """

    name: str
    total: int
    moves: bool = True
    graph_bytes: int = GRAPH
    compile_base: float = 0.25
    compile_per_op: float = 0.01
    max_ops: int = 4096
    block_softmax: bool = False
    fp8_top: float = 240.0
    column: str = "gaudi2"
    bandwidth: float = 2.45e12
    host_copy: float = 10e9


PROFILES = {
    "gaudi2": Profile("Gaudi 2", int(94.62 * GIB)),
    "gaudi3": Profile(
        "Gaudi 3", int(126.5 * GIB), block_softmax=True, fp8_top=448.0, column="gaudi3", bandwidth=3.7e12
    ),
}
"""Memory sizes from logs of the two cards, of nominally 96 and 128 GiB: docs/hpu-internals.md gives the sources."""


def profile(name: str) -> Profile:
    """Returns the profile called ``name``; empty means Gaudi 2."""
    found = PROFILES.get(name or "gaudi2")
    if found is None:
        raise StartupError(f"no emulated device {name!r}; there are: {', '.join(PROFILES)}")
    return found


RELEASE = "1.19.0"
"""The newest release whose lists are public."""

PRESENT = ("getitem",)
"""Operations that a graph takes whatever the list says: this one is not the card's."""
NO_BOOL = {"full": 1, "mul": 1}
"""Operation -> index of the argument that must not be a Python bool in a graph."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation: its treatment in a compiled graph, whether eager and lazy mode have it, and its known dtypes."""

    compiled: str
    present: bool
    types: frozenset[str]


class OpTable:
    """The operations of one release on one card; ``card`` is a column of the file."""

    def __init__(self, card: str, release: str = RELEASE) -> None:
        self.release, self.rows = release, _read(card, release)

    def fallback(self, func: Any, types: Iterable[torch.dtype], int64: bool = False) -> str:
        """Returns why an operation outside a compiled graph runs on the host's CPU; empty if the card runs it.

        Args:
            types: of its tensors.
            int64: True if the bridge tells 64-bit integers from 32-bit ones (compile mode only).
        """
        row = self.rows.get(base(func))
        if row is None or not row.present:
            return "" if composite(func) else f"it is not on the list of {self.release}"
        known = row.types | ({"int64"} if "int32" in row.types and not int64 else frozenset())
        wrong = sorted({str(t).removeprefix("torch.") for t in types} - known) if known else []
        return f"the list of {self.release} has it, and not for {', '.join(wrong)}" if wrong else ""

    def eager(self, func: Any, types: Sequence[torch.dtype], args: Sequence[Any]) -> str:
        """Returns why the compiler leaves an operation out of its graph; empty if it takes it."""
        name = base(func)
        if name in PRESENT:
            return ""
        row = self.rows.get(name)
        if row is not None and row.compiled == "eager":
            return f"it is on the fall-back list of {self.release}"
        if name == "permute" and torch.int64 in types:
            return "int64 is not permuted in a graph"
        if name in NO_BOOL and isinstance(args[NO_BOOL[name]], bool):
            return "a Python bool is no argument of it in a graph"
        if any(isinstance(a, float) and a != a for a in args):
            return "NaN is no argument in a graph"
        if name == "index_put":
            return "it takes no None among its indices in a graph" if None in args[1] else ""
        if row is not None and row.compiled == "graph":
            return ""
        if row is None:
            return f"it is not on the list of {self.release}"
        return self.fallback(func, types, int64=True)


@cache
def base(func: Any) -> str:
    """Returns the base name of an operation: ``index_copy`` for ``aten.index_copy_.default``."""
    stem = getattr(func, "__name__", str(func)).split(".")[0]
    return stem if stem.startswith("__") else re.sub(r"(?<=[a-z0-9])_$", "", stem)


@cache
def composite(func: Any) -> bool:
    """Returns True if torch composes an operation of others on a device that does not have it."""
    name = getattr(func, "name", None)
    if name is None or func.namespace != "aten":
        return True
    keys = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name(), key) for key in keys)


@cache
def _read(card: str, release: str) -> dict[str, OpRow]:
    path = Path(__file__).parent / "ops" / f"{release}.csv"
    with open(path, newline="", encoding="utf-8") as rows:
        return {
            row["name"]: OpRow(
                row["compiled"].removesuffix(" only"),
                not row["compiled"].endswith("only"),
                frozenset(row[card].split()),
            )
            for row in csv.DictReader(rows)
        }
