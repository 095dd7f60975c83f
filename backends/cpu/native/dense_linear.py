"""Products of few rows with a dense weight that oneDNN packed, and the argmax of each row without storing the outputs.

The library reads oneDNN's panels in place, so that prompts still use oneDNN's products and no weight is stored twice.
The weight itself is checked for having the expected layout.
"""

from __future__ import annotations

import ctypes
import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.native import kernel_threads
from trencadis.backends.cpu.native.ctypes_structs import DenseLayout
from trencadis.backends.cpu.native.kernel_choice_by_cpu import ANY, SHARED_ROWS, KernelTable, Op
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES
from trencadis.core.buckets import align_up

SIZES: tuple[int, ...] = (1, 4, 6, 8, 12, *range(16, 128, 8), 128, 160, 192, 256, 512)
"""Numbers of rows of a product, the only ones that oneDNN is called with."""

PASS = 20
"""Fixed cost of one more product with the same weight, in rows: the weight is read from memory again."""


def by_sizes(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``multiply(x)``, which treats rows independently, computed in calls of ``SIZES`` rows."""
    parts, start = list[Tensor](), 0
    for size in pieces(len(x)) or (0,):
        part = x[start : start + size]
        surplus = size - len(part)
        parts.append(multiply(functional.pad(part, (0, 0, 0, surplus)) if surplus else part))
        start += size
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y[: len(x)] if start > len(x) else y


def pieces(rows: int) -> tuple[int, ...]:
    """Returns ``SIZES`` that add up to at least ``rows``; surplus rows are computed if that is faster than another
    product.

    oneDNN makes kernels for each number of rows and each shape of weight and keeps 0.6 MB for each, half of it in a
    table without a limit. If every number of rows were a size of its own, memory would grow for hours, with each new
    prompt length and mix of clients, and each new number would be slow once.
    """
    return (SIZES[-1],) * (rows // SIZES[-1]) + _RESTS[rows % SIZES[-1]]


@cache
def _rest(rows: int) -> tuple[int, ...]:
    """Returns ``pieces`` for fewer rows than the largest size."""
    if rows == 0:
        return ()
    index = bisect_left(SIZES, rows)
    above = SIZES[index]
    if above == rows or index == 0:
        return (above,)
    below = SIZES[index - 1]
    split = (below, *_rest(rows - below))
    return (above,) if above + PASS <= sum(split) + PASS * len(split) else split


_RESTS = tuple(_rest(rows) for rows in range(SIZES[-1]))


ROWS = 128
"""Maximum rows of a call: ``DENSE_ROWS`` of dense.h. oneDNN is as fast for more rows."""

TILE_ROWS = 512
"""Maximum rows of a call by tiles: weights are read again for each call, and its activations and sums stay in the L2
cache.
"""

PANEL = 64
"""Number of outputs of a panel."""

UNITS = {torch.float32: 16, torch.bfloat16: 32}
"""oneDNN pads the inputs to a multiple of this, per dtype."""

CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes by their numbers in panels.h."""

LAST = 0x7FFFFFFF
"""The low 32 bits of a code are this minus the index of the output."""

NONE = -(1 << 63) | LAST
"""The code for no output."""


@dataclass(slots=True)
class Panels:
    """Address of a packed weight and its bias, which this object keeps alive."""

    at: int
    dtype: torch.dtype
    outputs: int
    most_rows: int
    """Maximum rows of a product; any number for a weight in a layout that oneDNN cannot read."""
    kind: int
    """Kind of the kernels, a number of ``kernel_choice_by_cpu.NUMBERS``."""
    call_rows: int
    """Maximum rows of a call of the library."""
    held: tuple[DenseLayout, Tensor, Tensor | None] = field(init=False, repr=False)


@dataclass(slots=True)
class PackedWeight:
    """A weight in a blocked layout: oneDNN's or, on some CPUs, only that of own products.

    Args:
        packed: tensor of oneDNN's layout; None: ``panels`` are used for every number of rows.
        panels: the layout of own products; None: oneDNN is used for every number of rows.
    """

    packed: Tensor | None
    bias: Tensor | None
    out_features: int
    in_features: int
    panels: Panels | None = None


def most_rows(table: KernelTable, dtype: torch.dtype) -> int:
    """Returns the most rows that the library multiplies with a weight of ``dtype``; 0: oneDNN is used instead."""
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return 0
    return table.most_rows(Op.LINEAR, DTYPE_NAMES.get(dtype, ""))


def launch_rows(table: KernelTable, dtype: torch.dtype) -> int:
    """Returns the most rows of a launch that the library computes alone; in larger ones torch multiplies or attends."""
    attends = table.serves(Op.ATTENTION, DTYPE_NAMES.get(dtype, ""))
    return most_rows(table, dtype) if attends else min(most_rows(table, dtype), SHARED_ROWS)


def launches_tiles(table: KernelTable, dtype: torch.dtype) -> bool:
    """Returns True if products by tiles take any number of rows of ``dtype``."""
    return table.by_tiles(Op.LINEAR, DTYPE_NAMES.get(dtype, "")) and most_rows(table, dtype) == ANY


def panels_of(packed: Tensor, weight: Tensor, bias: Tensor | None, table: KernelTable) -> Panels | None:
    """Returns the panels of a weight [out, in] that oneDNN packed; None if its layout differs, or no own kernel
    takes it.
    """
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
    """Returns the panels of a weight [outputs, inputs] that is packed at the address ``at``, in ``memory``.

    None if the bias has another dtype than the weight.
    """
    if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
        return None
    depth = align_up(inputs, UNITS[dtype])
    own = None if bias is None else bias.data_ptr()
    layout = DenseLayout(at, own, inputs, depth, outputs, CODES[dtype])  # a call sets the rest
    layout.pairs = table.bfloat16_pairs
    rows = TILE_ROWS if table.by_tiles(Op.LINEAR, DTYPE_NAMES[dtype]) else ROWS
    made = Panels(ctypes.addressof(layout), dtype, outputs, most_rows(table, dtype), table.number, rows)
    made.held = (layout, memory, bias)
    return made


def table_of(p: Panels) -> Tensor:
    """Returns a view of the packed weight without the padding of its inputs: [panels, in / pair, PANEL, pair]."""
    layout, packed, _ = p.held
    pair = 2 if p.dtype == torch.bfloat16 else 1
    count = align_up(p.outputs, PANEL) * layout.depth
    raw: Any = (ctypes.c_uint8 * (count * p.dtype.itemsize)).from_address(layout.weight)
    whole = torch.frombuffer(raw, dtype=p.dtype).view(-1, layout.depth // pair, PANEL, pair)
    table = whole[:, : layout.inputs // pair]
    table.held = packed  # type: ignore[attr-defined]
    return table


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """Returns rows [n, in] of a tensor from ``table_of``; a pair of 16-bit values is read as one of 32 bits."""
    return table.view(torch.int32)[ids // PANEL, :, ids % PANEL, 0].view(table.dtype)


def _lies(at: int, weight: Tensor, depth: int) -> bool:
    """Returns True if the first and last inputs of the first and the last panel are where they should be."""
    (outputs, inputs), size = weight.shape, weight.element_size()
    pair, some = (2 if weight.dtype == torch.bfloat16 else 1), min(inputs, 16)
    # Compared by bits, since weights may contain NaN.
    bits = torch.int32 if pair == 1 else torch.int16
    for first, start in itertools.product({0, (outputs - 1) // PANEL * PANEL}, {0, (inputs - some) // pair * pair}):
        raw: Any = (ctypes.c_uint8 * (PANEL * some * size)).from_address(at + (first * depth + start * PANEL) * size)
        held = torch.frombuffer(raw, dtype=weight.dtype).view(some // pair, PANEL, pair).transpose(0, 1)
        wanted = weight[first : first + PANEL, start : start + some].contiguous()
        if not torch.equal(held.reshape(PANEL, some)[: len(wanted)].view(bits), wanted.view(bits)):
            return False
    return True


def is_supported(x: Tensor, p: Panels) -> bool:
    """Returns True if ``product`` takes these rows."""
    return 0 < len(x) <= p.most_rows and x.dtype == p.dtype and x.stride(1) == 1


def product(x: Tensor, p: Panels) -> Tensor:
    """Multiplies [n, in] -> [n, out], some rows at a time. A row's bits do not depend on the others."""
    out = x.new_empty((len(x), p.outputs))
    call, team, size, stride = (
        kernel_threads.calls().dense,
        kernel_threads.launch_threads(),
        x.element_size(),
        x.stride(0),
    )
    for start in range(0, len(x), p.call_rows):
        rows = min(p.call_rows, len(x) - start)
        source, target = x.data_ptr() + start * stride * size, out.data_ptr() + start * p.outputs * size
        if call(p.at, source, target, None, rows, stride, p.outputs, 1.0, p.kind, team):
            raise MemoryError(f"no memory for the activations of {rows} rows of {x.shape[1]}")
    return out


def best(x: Tensor, p: Panels, outputs: int, scale: float) -> Tensor:
    """Returns int64 [n]: a code of the best of the first ``outputs`` outputs of each row, all multiplied by ``scale``.

    The larger code is the better output: by value, NaN above all others, and then by the lower index.
    """
    x = x.contiguous()
    found = torch.full((len(x),), NONE, dtype=torch.int64)
    if not outputs:
        return found
    call, team, row = kernel_threads.calls().dense, kernel_threads.launch_threads(), x.shape[1] * x.element_size()
    for start in range(0, len(x), ROWS):
        rows = min(ROWS, len(x) - start)
        source, target = x.data_ptr() + start * row, found.data_ptr() + start * 8
        if call(p.at, source, None, target, rows, x.shape[1], outputs, scale, p.kind, team):
            raise MemoryError(f"no memory for the activations of {rows} rows of {x.shape[1]}")
    return found
