"""Tables of the operations that a release of the bridge runs on the card, and that its compiler leaves out of graphs.

The tables are in ``ops/``, one file per release, made by ``tools/gen_hpu_ops.py`` from the published lists. For some
operations they list the supported dtypes; for the others a closed library decides, so that any dtype passes here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

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
