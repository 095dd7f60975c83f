"""Quantisation schemes and their memory cost. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

ROWS8 = "rows8"
"""Form of a device that multiplies 8-bit integers with one scale per output row (``Policy.quantised``)."""

ROW_BYTES = 12
"""Bytes that such a device keeps per row besides its integers: scale, zero point and their sum, 4 each."""

PANELS = "panels"
"""Form of a CPU with this package's kernels: 8- and 4-bit codes with the scales of their groups, in panels of 16
rows.
"""

PANEL = 16
"""Rows of a panel; the last panel is padded."""

CODES = "codes"
"""Form of a device that keeps 8- and 4-bit codes with the scales of their groups, and decodes them in every product."""

FLOATS8 = "floats8"
"""Form of a device that multiplies 8-bit floats with one scale per output row, and dequantises 4-bit integers when
it uses them.
"""

WORD = 8
"""Number of 4-bit codes in an int32, along the outputs, on such a device."""

FACTOR = 4
"""Bytes of the float32 factor of a row, which the forms CODES, PANELS and FLOATS8 keep."""

FP4_HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each 4-bit float (e2m1), by its code: the integers of a scheme with ``fp4``."""

BLOCK_SIZE = 128
"""Rows and columns that share a scale in weights which a device multiplies by activations of 8 bits with a scale for
each group of so many columns.
"""

FOURS = 4
"""Scales of the blocks of a column of blocks, and of the groups of rows, fill multiples of it, as cuBLAS asks for."""

CELL = 16
"""Number of consecutive columns whose multiple shares a scale in the form CODES.

In panels, only if ranks split reordered columns.
"""


class Cells(NamedTuple):
    """The layout of a weight's columns if codes are kept."""

    columns: int
    """Number of stored columns: groups are padded to whole cells."""
    group: int
    """Number of consecutive columns that share a scale; 0: the whole row."""
    gathered: bool
    """True if input columns must first be gathered in the weight's order."""


def cells(columns: int, group: int, ordered: bool = False) -> Cells:
    """Returns the layout of a weight of ``columns`` in groups of ``group``; the last group may be shorter."""
    if not group or columns <= group:
        return Cells(columns, 0, False)
    if group % CELL == 0:
        return Cells(columns, group, ordered)
    whole, rest = divmod(columns, group)
    return Cells(whole * _fill_columns(group) + _fill_columns(rest), CELL, True)


def panel_columns(columns: int, group: int, ordered: bool = False) -> Cells:
    """Returns the layout of a weight in panels: groups are padded to multiples of 8 columns, and keep their size."""
    if not group or columns <= group:
        return Cells(fill_up(columns, 8), 0, False)
    whole, rest = divmod(columns, group)
    kept = fill_up(group, 8)
    return Cells(whole * kept + fill_up(rest, 8), kept, ordered or kept != group)


def cut_columns(columns: int, groups: int) -> int:
    """Returns the stored columns of a rank's share of reordered columns; ``groups`` counts those of the whole matrix.

    How many columns of each group a share has is known only from the file, so every share has room for the worst case:
    n columns of g groups fill at most (n + (``CELL`` - 1) g) / ``CELL`` cells. It has at least two cells, and therefore
    scales.
    """
    return max((columns + (CELL - 1) * min(columns, groups)) // CELL, 2) * CELL


def fill_up(count: int, to: int) -> int:
    """Returns the next multiple of ``to``."""
    return -(-count // to) * to


def _fill_columns(columns: int) -> int:
    return fill_up(columns, CELL)


DECODED_ROWS, DECODED_BYTES = 1024, 32 << 20
"""Rows from which a card decodes a quantised weight once for all of them, and the bytes of it that it decodes at a
time: less than the L2 cache of an H100. With fewer rows the tiles, which decode it anew, are estimated to be faster: a
step of 256 rows of 7B in 4 bits takes 17.1 ms by tiles and 29.0 by pieces, a prompt of 1,024 tokens 34.1 and 33.1.
"""


def half_of(group: int) -> int:
    """Returns the distance in columns of two 4-bit codes that share a byte; both belong to the same group."""
    return gcd(group, 64) if group else 64


def code_bytes(bits: int, columns: int, group: int) -> int:
    """Returns the bytes of a row's codes."""
    return columns if bits == 8 else -(-columns // (2 * half_of(group))) * half_of(group)


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored.

    Args:
        bits: 4 or 8.
        kind: ``int``, or ``float`` (8 bits: 4 of exponent and 3 of mantissa, or 5 and 2).
        group: consecutive input columns that share a scale; 0: the whole row.
        block: output rows that share a scale; 0: all of them.
        symmetric: there are no zero points.
        activations: ``none``, ``token`` (a scale per token, computed at run time), ``static`` or ``given`` (a scale per
            module, from a file).
        ordered: True if a tensor assigns columns to groups.
        fp4: True if the integers, of 8 bits, are twice the values of 4-bit floats (``FP4_HALVES``); devices that keep
            codes keep 4 bits of each.
    """

    bits: int = 8
    kind: str = "int"
    group: int = 0
    block: int = 1
    symmetric: bool = True
    activations: str = "none"
    ordered: bool = False
    fp4: bool = False

    @property
    def code_bits(self) -> int:
        """Bits of a code on devices that keep codes."""
        return 4 if self.fp4 else self.bits

    @property
    def label(self) -> str:
        """Name of the scheme in messages: ``int4 in groups of 128``."""
        name = "fp4" if self.fp4 else f"fp{self.bits}" if self.kind == "float" else f"int{self.bits}"
        if self.block > 1 and self.group:
            return f"{name} in blocks of {self.block} x {self.group}"
        if self.group:
            return f"{name} in groups of {self.group}"
        return f"{name} with a scale a {'matrix' if self.block == 0 else 'row'}"


def held_bytes(
    scheme: Scheme | None, rows: int, columns: int, itemsize: int, form: str, whole: int = 0, first: bool = True
) -> int:
    """Returns the bytes that a device keeps of a weight [rows, columns].

    Args:
        scheme: the scheme in the checkpoint or requested by the user; None: the engine's dtype.
        itemsize: bytes of the engine's dtype.
        form: ``Policy.quantised``; empty if weights are kept in the engine's dtype.
        whole: columns of the stored matrix if ranks split it by columns.
        first: True for the first part of a fused matrix, which has one order of columns.
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


def has_block_scales(scheme: Scheme, rows: int, columns: int) -> bool:
    """Returns True for an 8-bit float weight in blocks of ``BLOCK_SIZE``, whose activations are rounded as the model
    runs, in a size that cards multiply.
    """
    blocks = scheme.kind == "float" and scheme.bits == 8 and scheme.group == scheme.block == BLOCK_SIZE
    return blocks and scheme.activations == "token" and rows % 16 == 0 and columns % BLOCK_SIZE == 0


def block_scale_bytes(scheme: Scheme, rows: int, columns: int, itemsize: int, form: str) -> int:
    """Returns the bytes of the scales of blocks, which a device that keeps codes has beside those of ``held_bytes``."""
    if form != CODES or itemsize != 2 or not has_block_scales(scheme, rows, columns):
        return 0
    return 4 * -(-rows // BLOCK_SIZE) * fill_up(columns // BLOCK_SIZE, FOURS)


def packs4(rows: int, columns: int, group: int) -> bool:
    """Returns True if a 4-bit weight stays packed on a device of ``FLOATS8``: whole words, groups of equal size."""
    return rows % WORD == 0 and (not group or columns % group == 0)


def _share(scheme: Scheme, columns: int, whole: int) -> Cells | None:
    """Returns the layout of a rank's share of reordered columns; None if it is not such a share."""
    groups = groups_of(whole, scheme.group)
    if not scheme.ordered or columns >= whole or groups == 1:
        return None
    return Cells(cut_columns(columns, groups), CELL, True)


def _whole_group(scheme: Scheme, columns: int, whole: int) -> int:
    """Returns the group size, reduced if the split cuts a group."""
    return gcd(scheme.group, columns) if scheme.group and columns < whole else scheme.group


def _codes_bytes(scheme: Scheme, rows: int, columns: int, itemsize: int, whole: int, first: bool) -> int:
    """Returns the bytes of codes, a factor per row, a scale of the engine's dtype per group, a byte per zero point,
    and 4 bytes per reordered column.
    """
    kept = _share(scheme, columns, whole) or cells(columns, _whole_group(scheme, columns, whole), scheme.ordered)
    groups = groups_of(kept.columns, kept.group)
    each = code_bytes(scheme.code_bits, kept.columns, kept.group) + FACTOR
    each += groups * itemsize if kept.group else 0
    each += 0 if scheme.symmetric or scheme.kind == "float" else groups
    return rows * each + (4 * kept.columns if kept.gathered and first else 0)


def _panel_bytes(scheme: Scheme, rows: int, columns: int, whole: int) -> int:
    """Returns the bytes of whole panels: codes, a factor per row, 2 bytes per group (4-bit floats: 1), one per zero
    point, and 4 bytes per reordered column.
    """
    kept = _share(scheme, columns, whole) or panel_columns(
        columns, _whole_group(scheme, columns, whole), scheme.ordered
    )
    groups = groups_of(kept.columns, kept.group)
    each = kept.columns * scheme.code_bits // 8 + FACTOR
    each += groups if scheme.fp4 else 2 * groups if kept.group else 0
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
    """Returns lines that describe the weights on a device that keeps them in ``form``.

    ``itemsize``: bytes of the engine's dtype.
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
    """Returns the number of groups in a row of ``columns``; the last may be shorter."""
    return -(-columns // group) if group else 1


def mlp_unit(inner: int, group: int, ranks: int) -> int:
    """Returns the number of columns of an MLP that ranks never split: a group, if each of ``ranks`` gets a whole one.

    Else 1.
    """
    return group if ranks > 1 and inner % group == 0 and inner // group >= ranks else 1
