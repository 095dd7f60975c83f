"""Which operations a release of the bridge runs on the card, and which of them its compiler leaves out of graphs.

The tables lie in ``ops/``, one file a release, made by ``tools/gen_hpu_ops.py`` from the published lists. Types are
named there for some operations; for the others a closed library decides, so that any type passes here.
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

PRESENT = ("getitem", "block_softmax_adjustment")
"""Taken by a graph whatever the list says: no operation of the card, and one that only later releases have."""
NO_BOOL = {"full": 1, "mul": 1}
"""Operations, and the argument that must not be a Python bool in a graph."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation: its treatment in a compiled graph, whether eager and lazy mode have it, the types it is known
    for.
    """

    compiled: str
    present: bool
    types: frozenset[str]


class OpTable:
    """The operations of one release on one card; ``card`` is a column of the file."""

    def __init__(self, card: str, release: str = RELEASE) -> None:
        self.release, self.rows = release, _read(card, release)

    def fallback(self, func: Any, types: Iterable[torch.dtype], int64: bool = False) -> str:
        """Why an operation outside a compiled graph runs on the host's CPU; empty where the card runs it.

        Args:
            types: of its tensors.
            int64: whether 64-bit integers are more than 32-bit ones to the bridge (compile mode alone).
        """
        row = self.rows.get(base(func))
        if row is None or not row.present:
            return "" if composite(func) else f"it is not on the list of {self.release}"
        known = row.types | ({"int64"} if "int32" in row.types and not int64 else frozenset())
        wrong = sorted({str(t).removeprefix("torch.") for t in types} - known) if known else []
        return f"the list of {self.release} has it, and not for {', '.join(wrong)}" if wrong else ""

    def eager(self, func: Any, types: Sequence[torch.dtype], args: Sequence[Any]) -> str:
        """Why the compiler leaves an operation out of its graph; empty where it takes it."""
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
    """``index_copy`` of ``aten.index_copy_.default``."""
    stem = getattr(func, "__name__", str(func)).split(".")[0]
    return stem if stem.startswith("__") else re.sub(r"(?<=[a-z0-9])_$", "", stem)


@cache
def composite(func: Any) -> bool:
    """Whether torch makes an operation out of others where a device has none of its own."""
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
