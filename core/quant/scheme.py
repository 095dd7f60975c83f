"""How a weight is quantised, and what it costs. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

ROWS8 = "rows8"
"""A device that multiplies integers of 8 bits with one scale an output row (``Policy.quantised``)."""

ROW_BYTES = 12
"""Bytes that such a device keeps for a row beside its integers: scale, zero point and their sum, 4 each."""

PANELS = "panels"
"""A CPU with kernels of this package: codes of 8 and 4 bits with the scales of their groups, 16 rows side by side."""

PANEL = 16
"""Rows that lie side by side in a panel; the last panel is filled up."""

CODES = "codes"
"""A device that keeps codes of 8 and 4 bits with the scales of their groups, and decodes them in every product."""

FLOATS8 = "floats8"
"""A device that multiplies floats of 8 bits with one scale an output row, and opens integers of 4 bits as it runs."""

WORD = 8
"""Codes of 4 bits in an int32, along the outputs, where such a device keeps them."""

FACTOR = 4
"""Bytes of the float32 factor of a row, which both keep."""

CELL = 16
"""Where codes are kept, a scale counts for a multiple of so many neighbouring columns; in panels, where ranks cut an
order of their own."""


class Cells(NamedTuple):
    """How the columns of a weight lie where codes are kept."""

    columns: int
    """Those that are kept: groups are filled up to whole cells."""
    group: int
    """Neighbouring columns that share a scale; 0: all of a row's."""
    gathered: bool
    """The input's columns are put in the weight's order first."""


def cells(columns: int, group: int, ordered: bool = False) -> Cells:
    """The layout of a weight of ``columns`` in groups of ``group``; the last one may be shorter."""
    if not group or columns <= group:
        return Cells(columns, 0, False)
    if group % CELL == 0:
        return Cells(columns, group, ordered)
    whole, rest = divmod(columns, group)
    return Cells(whole * _fill_columns(group) + _fill_columns(rest), CELL, True)


def panel_columns(columns: int, group: int, ordered: bool = False) -> Cells:
    """The layout of a weight in panels: groups are filled up to multiples of 8 columns, and keep their size."""
    if not group or columns <= group:
        return Cells(fill_up(columns, 8), 0, False)
    whole, rest = divmod(columns, group)
    kept = fill_up(group, 8)
    return Cells(whole * kept + fill_up(rest, 8), kept, ordered or kept != group)


def cut_columns(columns: int, groups: int) -> int:
    """Columns that are kept of a share that ranks cut in an order of its own, where ``groups`` are the whole matrix's.

    How many columns of a group a share has is the file's secret, so that every share has room for the worst: n columns
    of g groups fill (n + (``CELL`` - 1) g) / ``CELL`` cells at most. It has two at least, and with them scales.
    """
    return max((columns + (CELL - 1) * min(columns, groups)) // CELL, 2) * CELL


def fill_up(count: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-count // to) * to


def _fill_columns(columns: int) -> int:
    return fill_up(columns, CELL)


def half_of(group: int) -> int:
    """Codes of 4 bits share a byte with the one so many columns further: neither crosses a group."""
    return gcd(group, 64) if group else 64


def code_bytes(bits: int, columns: int, group: int) -> int:
    """Bytes of a row's codes."""
    return columns if bits == 8 else -(-columns // (2 * half_of(group))) * half_of(group)


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored.

    Args:
        bits: 4 or 8.
        kind: ``int``, or ``float`` (8 bits: 4 of exponent and 3 of mantissa, or 5 and 2).
        group: neighbouring input columns that share a scale; 0: all of a row's.
        block: output rows that share a scale; 0: all of them.
        symmetric: there are no zero points.
        activations: ``none``, ``token`` (a scale for each token, found as it runs), ``static`` or ``given`` (a scale of
            each module's own, which a file holds).
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


def held_bytes(
    scheme: Scheme | None, rows: int, columns: int, itemsize: int, form: str, whole: int = 0, first: bool = True
) -> int:
    """Bytes that a device keeps of a weight [rows, columns].

    Args:
        scheme: how the checkpoint or the user has it; None: in the engine's type.
        itemsize: bytes of a value of the engine's type.
        form: ``Policy.quantised``: empty where a weight is kept in the engine's type.
        whole: columns of the stored matrix, where ranks cut it by columns.
        first: it is the first of a fused matrix, which has one order of columns.
    """
    if scheme is not None and form == ROWS8 and scheme.kind == "int":
        return rows * (columns + ROW_BYTES)
    if scheme is not None and form == PANELS and scheme.kind == "int":
        return _panel_bytes(scheme, rows, columns, whole)
    if scheme is not None and form == FLOATS8 and scheme.kind == "float":
        return rows * (columns + FACTOR) + (FACTOR if scheme.activations == "given" and first else 0)
    if scheme is not None and form == FLOATS8 and itemsize == 2 and scheme.bits == 4:
        cut = scheme.group and columns < whole
        group = gcd(scheme.group, columns) if cut else scheme.group
        if packs4(rows, columns, group) and not (cut and scheme.ordered):
            groups = groups_of(columns, group)
            gathered = 4 * columns if scheme.ordered and first and groups > 1 else 0
            return rows * columns // 2 + groups * (2 * rows + rows // 2) + gathered
    if scheme is not None and form == CODES:
        return _codes_bytes(scheme, rows, columns, itemsize, whole, first)
    return rows * columns * itemsize


def packs4(rows: int, columns: int, group: int) -> bool:
    """Whether a weight of 4 bits stays packed on a device of ``FLOATS8``: whole words, groups of equal columns."""
    return rows % WORD == 0 and (not group or columns % group == 0)


def _share(scheme: Scheme, columns: int, whole: int) -> Cells | None:
    """The layout of a share that ranks cut in an order of its own; None: it is no such."""
    groups = groups_of(whole, scheme.group)
    if not scheme.ordered or columns >= whole or groups == 1:
        return None
    return Cells(cut_columns(columns, groups), CELL, True)


def _whole_group(scheme: Scheme, columns: int, whole: int) -> int:
    """The group, which a cut through it makes smaller."""
    return gcd(scheme.group, columns) if scheme.group and columns < whole else scheme.group


def _codes_bytes(scheme: Scheme, rows: int, columns: int, itemsize: int, whole: int, first: bool) -> int:
    """Codes, a factor a row, a scale of the engine's size a group, a byte a zero point, 4 a column of another order."""
    kept = _share(scheme, columns, whole) or cells(columns, _whole_group(scheme, columns, whole), scheme.ordered)
    groups = groups_of(kept.columns, kept.group)
    each = code_bytes(scheme.bits, kept.columns, kept.group) + FACTOR
    each += groups * itemsize if kept.group else 0
    each += 0 if scheme.symmetric or scheme.kind == "float" else groups
    return rows * each + (4 * kept.columns if kept.gathered and first else 0)


def _panel_bytes(scheme: Scheme, rows: int, columns: int, whole: int) -> int:
    """Whole panels: codes, a factor a row, 2 bytes a group, one a zero point; 4 a column in another order."""
    kept = _share(scheme, columns, whole) or panel_columns(
        columns, _whole_group(scheme, columns, whole), scheme.ordered
    )
    groups = groups_of(kept.columns, kept.group)
    each = kept.columns * scheme.bits // 8 + FACTOR
    each += 2 * groups if kept.group else 0
    each += 0 if scheme.symmetric else groups
    return fill_up(rows, PANEL) * each + (4 * kept.columns if kept.gathered else 0)


GIVEN = "the scales of QUANT_CONFIG's files"
KNOWN = {
    ROWS8: "int8 and int4 are kept",
    PANELS: "int8 and int4 are kept",
    FLOATS8: "fp8 and int4 are kept",
    "": "the CPU keeps int8 and int4, CUDA all",
}


def notes_of(schemes: Iterable[Scheme], form: str, itemsize: int) -> list[str]:
    """Lines that say what becomes of the weights on a device that keeps them in ``form``.

    ``itemsize``: bytes of a value of the engine's type.
    """
    lines = []
    for scheme in schemes:
        if form == ROWS8 and scheme.kind == "int":
            how = "as int8 with a scale a row, and activations as int8 with a scale a token"
            lines.append(f"weights: {scheme.label}, multiplied {how}")
        elif form == PANELS and scheme.kind == "int":
            how = "by own kernels as integers, with activations as int8 with a scale a token"
            lines.append(f"weights: {scheme.label}, kept as they are and multiplied {how}")
        elif form == FLOATS8 and scheme.kind == "float":
            given = scheme.activations == "given"
            how = f"as fp8 with a scale a row, and activations as fp8 with {GIVEN if given else 'a scale a token'}"
            lines.append(f"weights: {scheme.label}, multiplied {how}")
        elif form == FLOATS8 and scheme.bits == 4 and itemsize == 2:
            lines.append(f"weights: {scheme.label}, kept packed and opened to bfloat16 in every product")
        elif form == CODES:
            lines.append(f"weights: {scheme.label}, kept as they are and decoded in every product")
        else:
            wide = f"{8 * itemsize}-bit values"
            saves = f"become {wide} as they load, which saves no memory here"
            lines.append(f"weights: {scheme.label} {saves}; {KNOWN[form]}")
    return lines


def groups_of(columns: int, group: int) -> int:
    """Groups of a row of ``columns``; the last may be shorter."""
    return -(-columns // group) if group else 1


def mlp_unit(inner: int, group: int, ranks: int) -> int:
    """The columns of an MLP that ranks never cut: a group, if each of ``ranks`` gets a whole one; else 1."""
    return group if ranks > 1 and inner % group == 0 and inner // group >= ranks else 1
