"""The library's product of few rows with the experts that they take: routing, products and sum in one call.

Python and torch would take some 30 calls for it: a fifth of the time of one row of gpt-oss-20b's layers in MXFP4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import bounds_checks, kernel_threads
from trencadis.backends.cpu.native.attention_and_row_kernels import CLAMPED_SWIGLU, SILU_MUL
from trencadis.backends.cpu.native.ctypes_structs import ExpertsLayout
from trencadis.backends.cpu.native.dense_linear import PackedWeight
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, Op
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES, TYPES, PanelWeight
from trencadis.core.device.backend import Weight

MOST_ROWS = 16
"""Rows of the largest call: the products of more take longer than Python."""

Pointers = ctypes.Array[ctypes.c_void_p]

ACTIVATIONS = {"silu": SILU_MUL, "clamped_swiglu": CLAMPED_SWIGLU}
"""Activations of experts with gates that the library computes."""


class Routing(NamedTuple):
    """How a layer uses its experts: experts per row, whether their shares are scaled to add up to 1, the activation."""

    top: int
    normalise: bool
    kind: str


@dataclass
class ExpertTable:
    """Addresses of a layer's packed experts, all codes or all values of one dtype.

    Args:
        gate_up, down: addresses of each expert's weights, in the library's form.
        coded: they are ``PanelWeight``, else dense.
        most_rows: the most rows that their kernels take.
        kind: kind of the kernels.
    """

    gate_up: Pointers
    down: Pointers
    hidden: int
    inner: int
    coded: bool
    most_rows: int
    kind: int
    known: dict[tuple[Routing, torch.dtype], ExpertsLayout] = field(default_factory=dict)

    def layout(self, routing: Routing, dtype: torch.dtype) -> ExpertsLayout:
        """Returns the structure that a call reads; it lives as long as the table."""
        made = self.known.get((routing, dtype))
        if made is None:
            made = self.known[routing, dtype] = ExpertsLayout(
                ctypes.addressof(self.gate_up), ctypes.addressof(self.down), len(self.gate_up), routing.top,
                self.hidden, self.inner, TYPES[dtype], self.coded, ACTIVATIONS[routing.kind], routing.normalise,
            )  # fmt: skip
        return made


def make_table(gate_up: Sequence[Weight], down: Sequence[Weight], inner: int) -> ExpertTable | None:
    """Returns the table of packed experts with gates; None if some of them have no kernels of the library."""
    hidden, each = down[0].out_features, [*gate_up, *down]
    if gate_up[0].out_features != 2 * inner or gate_up[0].in_features != hidden:
        return None
    places, most, kinds = list[int](), MOST_ROWS, set[tuple[bool, int]]()
    for one in each:
        if isinstance(one, PanelWeight):
            places.append(one.at)
            kinds.add((True, one.kind))
        elif isinstance(one, PackedWeight) and one.panels is not None:
            places.append(one.panels.at)
            kinds.add((False, one.panels.kind))
            most = min(most, one.panels.most_rows, one.panels.call_rows)
        else:
            return None
    if len(kinds) > 1:
        return None
    (coded, kind), count = kinds.pop(), len(gate_up)
    array = ctypes.c_void_p * count
    return ExpertTable(array(*places[:count]), array(*places[count:]), hidden, inner, coded, most, kind)


def takes(x: Tensor, scores: Tensor, table: ExpertTable, routing: Routing, kernels: KernelTable) -> bool:
    """Returns True if the library computes these rows."""
    return (
        0 < len(x) <= table.most_rows
        and x.dtype == torch.bfloat16
        and (Op.ROWWISE, DTYPE_NAMES[x.dtype]) in kernels.rows
        and x.is_contiguous()
        and scores.is_contiguous()
        and scores.dtype in (torch.bfloat16, torch.float32)
        and routing.kind in ACTIVATIONS
        and not bounds_checks.enabled()
    )


def run_few(
    x: Tensor, scores: Tensor, table: ExpertTable | None, routing: Routing, kernels: KernelTable
) -> Tensor | None:
    """Computes ``backend.Ops.experts`` of rows [n, hidden]; None: torch must do it.

    Raises:
        MemoryError: there is no memory for what lies between the products.
    """
    if table is None or not takes(x, scores, table, routing, kernels):
        return None
    out, layout = torch.empty_like(x), table.layout(routing, x.dtype)
    failed = kernel_threads.calls().experts(
        ctypes.addressof(layout), x.data_ptr(), scores.data_ptr(), TYPES[scores.dtype], out.data_ptr(), len(x),
        table.kind, kernel_threads.launch_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the experts of {len(x)} rows of {x.shape[1]}")
    return out
