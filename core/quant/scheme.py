"""How a weight is quantised, and what it costs. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ROWS8 = "rows8"
"""A device that multiplies integers of 8 bits with one scale an output row (``Policy.quantised``)."""

ROW_BYTES = 12
"""Bytes that such a device keeps for a row beside its integers: scale, zero point and their sum, 4 each."""


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored.

    Args:
        bits: 4 or 8.
        kind: ``int``, or ``float`` (8 bits: 4 of exponent and 3 of mantissa, or 5 and 2).
        group: neighbouring input columns that share a scale; 0: all of a row's.
        block: output rows that share a scale; 0: all of them.
        symmetric: there are no zero points.
        activations: ``none``, ``token`` (a scale for each token, found as it runs) or ``static``.
        ordered: a tensor says which group a column belongs to.
    """

    bits: int = 8
    kind: str = "int"
    group: int = 0
    block: int = 1
    symmetric: bool = True
    activations: str = "none"
    ordered: bool = False

    @property
    def label(self) -> str:
        """The scheme as lines name it: ``int4 in groups of 128``."""
        name = f"fp{self.bits}" if self.kind == "float" else f"int{self.bits}"
        if self.block > 1 and self.group:
            return f"{name} in blocks of {self.block} x {self.group}"
        if self.group:
            return f"{name} in groups of {self.group}"
        return f"{name} with a scale a {'matrix' if self.block == 0 else 'row'}"


def held_bytes(scheme: Scheme | None, rows: int, columns: int, itemsize: int, form: str) -> int:
    """Bytes that a device keeps of a weight [rows, columns].

    Args:
        scheme: how the checkpoint or the user has it; None: in the engine's type.
        itemsize: bytes of a value of the engine's type.
        form: ``Policy.quantised``: empty where a weight is kept in the engine's type.
    """
    if scheme is not None and form == ROWS8 and scheme.kind == "int":
        return rows * (columns + ROW_BYTES)
    return rows * columns * itemsize


def notes_of(schemes: Iterable[Scheme], form: str, itemsize: int) -> list[str]:
    """Lines that say what becomes of the weights on a device that keeps them in ``form``.

    ``itemsize``: bytes of a value of the engine's type.
    """
    lines = []
    for scheme in schemes:
        if form == ROWS8 and scheme.kind == "int":
            how = "as int8 with a scale a row, and activations as int8 with a scale a token"
            lines.append(f"weights: {scheme.label}, multiplied {how}")
        else:
            known = "int8 and int4 are kept" if form == ROWS8 else "the CPU keeps int8 and int4"
            wide = f"{8 * itemsize}-bit values"
            lines.append(f"weights: {scheme.label} become {wide} as they load, which saves no memory here; {known}")
    return lines


def groups_of(columns: int, group: int) -> int:
    """Groups of a row of ``columns``; the last may be shorter."""
    return -(-columns // group) if group else 1


def mlp_unit(inner: int, group: int, ranks: int) -> int:
    """The columns of an MLP that ranks never cut: a group, if each of ``ranks`` gets a whole one; else 1."""
    return group if ranks > 1 and inner % group == 0 and inner // group >= ranks else 1
