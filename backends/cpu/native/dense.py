"""Products of few rows with a dense weight that oneDNN packed, and the best output of each row without the outputs.

The library reads oneDNN's panels where they lie, so that prompts keep oneDNN's products and no weight is held twice.
Whether a weight lies as the library expects is read from the weight itself.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cpu.native import threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, Op
from trencadis.backends.cpu.native.layouts import DenseLayout
from trencadis.backends.cpu.native.panels import DTYPE_NAMES
from trencadis.core.shared_constants import align_up

ROWS = 128
"""Most rows of a call: ``DENSE_ROWS`` of dense.h. oneDNN is as fast from there on."""

PANEL = 64
"""Outputs of a panel."""

UNITS = {torch.float32: 16, torch.bfloat16: 32}
"""What oneDNN fills the inputs to a multiple of."""

CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Types by their numbers in panels.h."""

LAST = 0x7FFFFFFF
"""A code's low 32 bits are this less the output's index."""

NONE = -(1 << 63) | LAST
"""The code of no output."""


@dataclass(slots=True)
class Panels:
    """Where a packed weight and its bias lie, which it keeps alive."""

    at: int
    dtype: torch.dtype
    outputs: int
    most_rows: int
    """Of a product; a weight that does not lie as oneDNN has it takes any number."""
    kind: int
    """Of the kernels, a number of ``kernel_table.NUMBERS``."""
    held: tuple[DenseLayout, Tensor, Tensor | None] = field(init=False, repr=False)


def most_rows(table: KernelTable, dtype: torch.dtype) -> int:
    """The most rows that the library multiplies with a weight of ``dtype``; 0: none, oneDNN serves."""
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return 0
    return table.most_rows(Op.LINEAR, DTYPE_NAMES.get(dtype, ""))


def panels_of(packed: Tensor, weight: Tensor, bias: Tensor | None, table: KernelTable) -> Panels | None:
    """The panels of a weight [out, in] that oneDNN packed; None where it lies otherwise, or nothing here serves it."""
    outputs, inputs = weight.shape
    if not most_rows(table, weight.dtype) or inputs % 2 or not outputs:
        return None
    depth, size = align_up(inputs, UNITS[weight.dtype]), weight.element_size()
    if torch.ops.mkldnn._nbytes(packed) != align_up(outputs, PANEL) * depth * size:
        return None
    if not _lies(torch.ops.mkldnn.data_ptr(packed), weight, depth):
        return None
    return panels_at(torch.ops.mkldnn.data_ptr(packed), packed, outputs, inputs, weight.dtype, bias, table)


def panels_at(
    at: int, memory: Tensor, outputs: int, inputs: int, dtype: torch.dtype, bias: Tensor | None, table: KernelTable
) -> Panels | None:
    """The panels of a weight [outputs, inputs] that lies in them at the address ``at``, in ``memory``.

    None where the bias has another type than the weight.
    """
    if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
        return None
    depth = align_up(inputs, UNITS[dtype])
    own = None if bias is None else bias.data_ptr()
    layout = DenseLayout(at, own, inputs, depth, outputs, CODES[dtype])  # the rest is the call's
    layout.pairs = table.bfloat16_pairs
    made = Panels(ctypes.addressof(layout), dtype, outputs, most_rows(table, dtype), table.number)
    made.held = (layout, memory, bias)
    return made


def table_of(p: Panels) -> Tensor:
    """The weight where it lies, without what fills its rows up: [panels, in / pair, PANEL, pair]."""
    layout, packed, _ = p.held
    pair = 2 if p.dtype == torch.bfloat16 else 1
    count = align_up(p.outputs, PANEL) * layout.depth
    raw: Any = (ctypes.c_uint8 * (count * p.dtype.itemsize)).from_address(layout.weight)
    whole = torch.frombuffer(raw, dtype=p.dtype).view(-1, layout.depth // pair, PANEL, pair)
    table = whole[:, : layout.inputs // pair]
    table.held = packed  # type: ignore[attr-defined]
    return table


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """[n, in]: rows of what ``table_of`` gave; a pair of values of 16 bits is read as one of 32."""
    return table.view(torch.int32)[ids // PANEL, :, ids % PANEL, 0].view(table.dtype)


def _lies(at: int, weight: Tensor, depth: int) -> bool:
    """Whether the first and the last inputs of the first and of the last panel are where they should be."""
    (outputs, inputs), size = weight.shape, weight.element_size()
    pair, some = (2 if weight.dtype == torch.bfloat16 else 1), min(inputs, 16)
    # By their bits: weights may hold what is no number.
    bits = torch.int32 if pair == 1 else torch.int16
    for first, start in itertools.product({0, (outputs - 1) // PANEL * PANEL}, {0, (inputs - some) // pair * pair}):
        raw: Any = (ctypes.c_uint8 * (PANEL * some * size)).from_address(at + (first * depth + start * PANEL) * size)
        held = torch.frombuffer(raw, dtype=weight.dtype).view(some // pair, PANEL, pair).transpose(0, 1)
        wanted = weight[first : first + PANEL, start : start + some].contiguous()
        if not torch.equal(held.reshape(PANEL, some)[: len(wanted)].view(bits), wanted.view(bits)):
            return False
    return True


def is_supported(x: Tensor, p: Panels) -> bool:
    """Whether ``product`` takes these rows."""
    return 0 < len(x) <= p.most_rows and x.dtype == p.dtype and x.stride(1) == 1


def product(x: Tensor, p: Panels) -> Tensor:
    """[n, in] -> [n, out], ``ROWS`` rows at a time. No row's bits depend on the others."""
    out = x.new_empty((len(x), p.outputs))
    call, team, size, stride = threads.calls().dense, torch.get_num_threads(), x.element_size(), x.stride(0)
    for start in range(0, len(x), ROWS):
        rows = min(ROWS, len(x) - start)
        source, target = x.data_ptr() + start * stride * size, out.data_ptr() + start * p.outputs * size
        call(p.at, source, target, None, rows, stride, p.outputs, 1.0, p.kind, team)
    return out


def best(x: Tensor, p: Panels, outputs: int, scale: float) -> Tensor:
    """int64 [n]: a code of the best of the first ``outputs`` outputs of each row, all multiplied by ``scale``.

    The larger code is the better output: by value, no number above all, and then by the lower index.
    """
    x = x.contiguous()
    found = torch.full((len(x),), NONE, dtype=torch.int64)
    if not outputs:
        return found
    call, team, row = threads.calls().dense, torch.get_num_threads(), x.shape[1] * x.element_size()
    for start in range(0, len(x), ROWS):
        rows = min(ROWS, len(x) - start)
        source, target = x.data_ptr() + start * row, found.data_ptr() + start * 8
        call(p.at, source, None, target, rows, x.shape[1], outputs, scale, p.kind, team)
    return found
