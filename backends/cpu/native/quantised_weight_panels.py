"""8-bit and 4-bit weights in panels of 16 output rows, and the product with them (panels.h has the layout).

A value is (code - zero) x scale of its group x factor of its row. Scales are float16, those of 4-bit floats exponents.
Codes are stored unsigned. Columns are padded to whole steps of 8, and so are groups of other sizes; in that case, and
if columns have another order, the input is gathered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.native import kernel_choice_by_cpu, kernel_library, kernel_threads
from trencadis.backends.cpu.native.ctypes_structs import Layout
from trencadis.backends.cpu.native.kernel_choice_by_cpu import BFLOAT16, FLOAT16, FLOAT32
from trencadis.core.quant.quantised_tensor import SLAB, QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import (
    CELL,
    FP4_HALVES,
    PANEL,
    cut_columns,
    fill_up,
    panel_columns,
)

STEP = 8
"""Columns must be a multiple of this."""

LONGEST = 65536
"""Maximum columns of one sum of integers: 32 bits hold 255 x 127 x this many."""

BIAS = 127
"""Stored exponents of scales are larger by this."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of activations, biases and results -> their numbers in panels.h."""

DTYPE_NAMES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Dtypes -> their names in the kernel table."""

ROWS = 512
"""Rows of a call: the activations of this many are rounded at a time."""


@dataclass(slots=True)
class PanelWeight:
    """A weight [out, in] in panels.

    Args:
        codes: uint8 [panels, bytes].
        scale: float16 [panels, groups, 16], or with ``values`` uint8: exponents of powers of two plus 127, where 0 is a
            scale of zero; None: only the factor.
        zero: uint8 [panels, groups, 16]; None: the middle code.
        factor: float32 [panels * 16].
        gather: int32 [columns], the input's column of each column, -1: a zero; None: in order.
        bias: [out] of the engine's dtype.
        values: uint8 [16], the value of each 4-bit code; None: the code itself.
        middle: the value that stands for zero if there are no zero points.
        kind: kind of the kernels, a number of ``kernel_choice_by_cpu.NUMBERS``.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    factor: Tensor
    gather: Tensor | None
    bias: Tensor | None
    values: Tensor | None
    columns: int
    group: int
    bits: int
    middle: int
    kind: int
    out_features: int
    in_features: int
    layout: Layout = field(init=False)
    at: int = field(init=False)

    def __post_init__(self) -> None:
        held = (self.codes, self.scale, self.zero, self.factor, self.gather, self.bias, self.values)
        at = [None if t is None else t.data_ptr() for t in held]
        sizes = (self.out_features, self.in_features, self.columns, self.group, self.bits, self.middle)
        self.layout = Layout(*at, *sizes)
        self.at = ctypes.addressof(self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors except the bias and the table."""
        held = (self.codes, self.scale, self.zero, self.factor, self.gather)
        return sum(t.nbytes for t in held if t is not None)


Take = Callable[[int], Tensor]
"""Allocates uint8 [size] of zeros at a multiple of 64 bytes."""


def _take(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def panel_weight(q: QTensor, bias: Tensor | None, take: Take = _take) -> PanelWeight | None:
    """Packs integers for the kernels in use; returns None if these are torch's, or if sums could overflow.

    ``take`` allocates codes and scales: huge pages are read a sixth faster than the small ones of torch's memory.
    """
    table = kernel_choice_by_cpu.chosen_table()
    kind = table.number
    if not kind or q.data.dtype != torch.int8 or q.dtype not in TYPES:
        return None
    kernel_library.log_quantised_kernels(f"own kernels ({table.kind})")
    slots, group, of = _arrange_columns(q)
    if group > LONGEST or (q.scheme.fp4 and not _has_powers(q.scale)):
        return None
    scale, zero = q.scale, q.zero
    if of is not None:
        scale, zero = scale[:, of], None if zero is None else zero[:, of]
    values = _FP4 if q.scheme.fp4 else None
    factor, parts = _factors(scale) if values is None else _exponents(scale)
    middle = 8 if q.scheme.bits == 4 else 128 if values is None else int(values[0])
    if zero is None and not q.scheme.symmetric:
        zero = torch.zeros_like(scale, dtype=torch.int8)  # the planner charges zero points
    points = None if zero is None else _by_panel((zero.short() + middle).to(torch.uint8))
    columns = len(slots) if slots is not None else fill_up(q.shape[1], STEP)
    return PanelWeight(
        _codes(q, slots, columns, middle, values, take),
        None if parts is None else _place(_by_panel(parts), take),
        points,
        functional.pad(factor, (0, -len(factor) % PANEL)),
        slots, bias, values, columns, group, 8 if q.scheme.bits == 8 and values is None else 4, middle, kind, *q.shape,
    )  # fmt: skip


class _StoredColumns(NamedTuple):
    """How panels store a weight's columns."""

    slots: Tensor | None  # int32: the input's column of each stored column, -1 for padding; None: as they are
    group: int  # columns of a group
    group_of: Tensor | None  # int64: the group of each stored group; None: as they are


def _arrange_columns(q: QTensor) -> _StoredColumns:
    """Orders columns by group, and pads each group to whole steps."""
    columns = q.shape[1]
    if q.scale.shape[1] == 1:
        return _StoredColumns(None, fill_up(columns, STEP), None)
    kept = panel_columns(columns, q.group)
    if q.order is None and not kept.gathered:
        return _StoredColumns(None, kept.group, None)
    where = torch.argsort(q.columns(), stable=True)
    sizes: list[int] = torch.bincount(q.columns(), minlength=q.scale.shape[1]).tolist()
    if not q.shared and all(n == sizes[0] for n in sizes[:-1]) and 0 < sizes[-1] <= sizes[0]:
        group, of = fill_up(sizes[0], STEP), None
        counts = [*(group for _ in sizes[:-1]), fill_up(sizes[-1], STEP)]
    else:
        group = CELL
        counts = [fill_up(n, CELL) for n in sizes]
        if q.shared:  # pads up to the size that the planner charges
            sizes.append(0)
            counts.append(cut_columns(columns, q.scale.shape[1]) - sum(counts))
        of = torch.repeat_interleave(torch.arange(len(sizes)) % q.scale.shape[1], torch.tensor(counts) // CELL)
    slots, start, at = torch.full((sum(counts),), -1, dtype=torch.int32), 0, 0
    for size, count in zip(sizes, counts, strict=True):
        slots[at : at + size] = where[start : start + size].int()
        start, at = start + size, at + count
    return _StoredColumns(slots, group, of)


_FP4 = torch.tensor([12 + half for half in FP4_HALVES], dtype=torch.uint8)
"""Values of the codes of a scheme with ``fp4``."""


def _place(held: Tensor, take: Take) -> Tensor:
    """Copies a tensor to memory of ``take``."""
    return take(held.nbytes).view(held.dtype).view(held.shape).copy_(held)


def _codes(q: QTensor, slots: Tensor | None, columns: int, middle: int, table: Tensor | None, take: Take) -> Tensor:
    """Packs int8 [out, in] into uint8 [panels, bytes], some panels at a time; ``table``: the values of 4-bit codes."""
    rows, bits = q.shape[0], q.scheme.bits if table is None else 4
    places = None if table is None else (torch.arange(int(table.max()) + 1)[:, None] == table).byte().argmax(1)
    panels, wide = fill_up(rows, PANEL) // PANEL, columns * PANEL * bits // 8
    out = take(panels * wide).view(panels, wide)
    step = max(SLAB // 4 // (columns * PANEL), 1)
    for first in range(0, len(out), step):
        part = q.data[first * PANEL : (first + step) * PANEL]
        if slots is not None:
            part = part.index_select(1, slots.clamp_min(0))
        part = functional.pad(part, (0, columns - part.shape[1], 0, -len(part) % PANEL))
        codes = (part.short() + middle).to(torch.uint8)
        if places is not None:
            codes = places.to(torch.uint8)[codes.long()]
        quads = codes.view(-1, PANEL, columns // 4, 4).transpose(1, 2)
        if bits == 4:
            pairs = quads.reshape(len(quads), columns // 8, 2, PANEL, 4)
            quads = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
        out[first : first + step] = quads.reshape(len(quads), -1)
    return out


def _has_powers(scale: Tensor) -> bool:
    """Returns True if all scales are powers of two, or zero."""
    return bool(((torch.frexp(scale.float())[0] == 0.5) | (scale == 0)).all())


def _exponents(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Splits powers of two into factors, float32 [out], and exponents plus 127 of the rest, uint8 [out, groups]."""
    found = torch.frexp(scale.float())[1]
    most = torch.frexp(scale.float().amax(1))[1]
    rest = (BIAS - 1 + found - most[:, None]).clamp_min(0)
    return torch.ldexp(torch.ones_like(most, dtype=torch.float32), most), torch.where(scale > 0, rest, 0).byte()


def _factors(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Splits scales into float32 [out] factors and the rest, float16 [out, groups] up to 1; None for one scale per row.

    Factors are powers of two, so that 16-bit scales lose nothing unless those of one row span the whole range.
    """
    if scale.shape[1] == 1:
        return scale[:, 0].float().clone(), None
    factor = torch.ldexp(torch.ones_like(scale[:, 0]), torch.frexp(scale.amax(1))[1])
    return factor, (scale / factor[:, None]).to(torch.float16)


def _by_panel(each: Tensor) -> Tensor:
    """Rearranges [out, groups] -> [panels, groups, 16]."""
    whole = functional.pad(each, (0, 0, 0, -len(each) % PANEL))
    return whole.view(-1, PANEL, each.shape[1]).transpose(1, 2).contiguous()


def product(x: Tensor, w: PanelWeight) -> Tensor:
    """Multiplies [n, in] -> [n, out] in ``x``'s dtype, which the bias must have too. A row's bits do not depend on the
    others.
    """
    x = x.contiguous()
    n = len(x)
    out = x.new_empty((n, w.out_features))
    call, team = kernel_threads.calls().linear, kernel_threads.launch_threads()
    kind, source, target = TYPES[x.dtype], x.data_ptr(), out.data_ptr()
    for start in range(0, n, ROWS):
        rows, size = min(ROWS, n - start), x.element_size()
        failed = call(
            w.at,
            source + start * w.in_features * size,
            target + start * w.out_features * size,
            rows,
            kind,
            w.kind,
            team,
        )
        if failed:
            raise MemoryError(f"no memory for the activations of {rows} rows of {w.in_features}")
    return out


def dequantise(w: PanelWeight) -> Tensor:
    """Returns float32 [out, in]: the values that the kernels multiply by, for tests."""
    panels = len(w.codes)
    if w.bits == 4:
        pairs = w.codes.view(panels, w.columns // 8, 1, PANEL, 4)
        quads = torch.cat([pairs & 15, pairs >> 4], 2).view(panels, w.columns // 4, PANEL, 4)
    else:
        quads = w.codes.view(panels, w.columns // 4, PANEL, 4)
    quads = quads if w.values is None else w.values[quads.long()]
    values = quads.transpose(1, 2).reshape(panels * PANEL, w.columns).float()
    wide: Any = lambda t: t.transpose(1, 2).reshape(panels * PANEL, -1).float().repeat_interleave(w.group, 1)  # noqa: E731
    values -= float(w.middle) if w.zero is None else wide(w.zero)[:, : w.columns]
    if w.scale is not None:
        found = wide(w.scale)[:, : w.columns]
        values *= found if w.values is None else torch.where(found > 0, torch.exp2(found - BIAS), 0.0)
    values = (values * w.factor[:, None])[: w.out_features]
    if w.gather is None:
        return values[:, : w.in_features]
    out = torch.zeros(w.out_features, w.in_features)
    real = w.gather >= 0
    out[:, w.gather[real].long()] = values[:, real]
    return out
