"""Operations between products, in one pass over each row.

Norms and gates of 16-bit values only, for which torch takes up to nine passes; the argmax of a row of any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.cpu.native import threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, Op
from trencadis.backends.cpu.native.panels import DTYPE_NAMES, TYPES

SILU_MUL, RMS_NORM, BEST, WIDE_NORM = range(4)


def silu_mul(gate_up: Tensor, table: KernelTable) -> Tensor | None:
    """Computes silu of the first half of each row times the second: [n, 2 width] -> [n, width]. None: torch must do
    it.
    """
    if not table.serves(Op.ROWWISE, DTYPE_NAMES.get(gate_up.dtype, "")) or not gate_up.is_contiguous():
        return None
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((n, width))
    _run(SILU_MUL, gate_up, None, None, out, n, width, 0.0, table.number)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, table: KernelTable) -> Tensor | None:
    """Computes x / rms(x) * weight of rows [n, width], in which a float32 weight is multiplied before the norm is
    rounded; a residual is first added to ``x`` in place. None: torch must do it.
    """
    wide = weight.dtype != x.dtype
    if not table.serves(Op.ROWWISE, DTYPE_NAMES.get(x.dtype, "")) or (wide and weight.dtype != torch.float32):
        return None
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return None
    width = x.shape[-1]
    out = torch.empty_like(x)
    _run(WIDE_NORM if wide else RMS_NORM, x, residual, weight, out, x.numel() // width, width, eps, table.number)
    return out


def gated_norm(y: Tensor, weight: Tensor, eps: float, gate: Tensor, table: KernelTable) -> Tensor | None:
    """Computes ``RecurrentOps.gated_norm``; None: torch must do it."""
    n, heads, width = y.shape
    if not table.serves(Op.ROWWISE, DTYPE_NAMES.get(y.dtype, "")) or not y.dtype == weight.dtype == gate.dtype:
        return None
    if not y.is_contiguous() or gate.stride(1) != 1:
        return None
    out = y.new_empty((n, heads * width))
    threads.calls().gated_norm(
        y.data_ptr(), weight.data_ptr(), gate.data_ptr(), out.data_ptr(), n * heads, width, heads, gate.stride(0), eps,
        TYPES[y.dtype], table.number, threads.launch_threads(),
    )  # fmt: skip
    return out


def best(logits: Tensor, table: KernelTable) -> Tensor | None:
    """Returns int64 [n]: the index of the first largest value of each row [n, width]. None: torch must find it."""
    served = table.serves(Op.ARGMAX, DTYPE_NAMES.get(logits.dtype, ""))
    if not served or not logits.is_contiguous() or logits.shape[1] == 0:
        return None
    n, width = logits.shape
    out = torch.empty(n, dtype=torch.int64)
    _run(BEST, logits, None, None, out, n, width, 0.0, table.number)
    return out


def _run(
    op: int, x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, n: int, width: int, eps: float,
    kind: int,
) -> None:  # fmt: skip
    threads.calls().rows(
        op, x.data_ptr(), None if residual is None else residual.data_ptr(),
        None if weight is None else weight.data_ptr(), out.data_ptr(), n, width, eps, TYPES[x.dtype], kind,
        threads.launch_threads(),
    )  # fmt: skip
