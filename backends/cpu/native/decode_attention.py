"""Attention of decoding rows by the library's kernel, which reads keys and values in place, in their blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.native import checks, threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, Op
from trencadis.backends.cpu.native.layouts import AttendLayout
from trencadis.backends.cpu.native.panels import DTYPE_NAMES, TYPES
from trencadis.core.device.backend import LayerKV

LANES = 16
"""Values of a head must be a multiple of this, the widest vector."""

WIDEST = 512
"""Maximum values of a head, as in panels.h."""

CODES = {torch.int8: 3, torch.uint8: 4, torch.float8_e4m3fn: 4}
"""Dtypes of 8-bit codes by their numbers in panels.h; without a dtype of 8-bit floats those are stored as uint8."""


@dataclass(frozen=True)
class SingleTokenRows:
    """Rows of one token each, int32 [n]: the launch's token, the row of the block tables, and the keys [first, length).

    ``blocks``: int32 [rows, width].
    """

    token: NDArray[np.int32]
    row: NDArray[np.int32]
    first: NDArray[np.int32]
    length: NDArray[np.int32]
    blocks: Tensor


def is_supported(q: Tensor, kv: LayerKV, table: KernelTable) -> bool:
    """Returns True if the kernel supports the cache: values of ``q``'s dtype, or 8-bit codes with scales."""
    size = kv.k.shape[-1]
    if size % LANES or size > WIDEST or not table.serves(Op.DECODE_ATTENTION, DTYPE_NAMES.get(q.dtype, "")):
        return False
    coded = kv.k_scale is not None and kv.k.dtype in CODES
    return (coded or kv.k.dtype == q.dtype) and kv.k.is_contiguous() and kv.v.is_contiguous()


def attend(
    q: Tensor, kv: LayerKV, rows: SingleTokenRows, scale: float, out: Tensor, table: KernelTable,
    sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes attention of single tokens: q [n, h, d]; ``out`` [n, h, d] is written for the tokens in ``rows``.

    A row's bits depend only on the row. Softmax and sums are float32. ``sinks``: float32 [h], as for ``Ops.attend``.
    """
    _, heads, size = q.shape
    if q.stride(2) != 1 or q.stride(1) != size:
        q = q.contiguous()
    assert out.is_contiguous() and rows.blocks.stride(1) == 1
    if checks.enabled():
        checks.check_range("rows of queries", rows.token, 0, len(q))
        checks.check_blocks(rows.blocks, rows.row, rows.first, rows.length, kv.k.shape[1], kv.k.shape[0])
    kept = 0 if kv.kept is None else kv.kept.shape[-1]
    at = [None if t is None else t.data_ptr() for t in (q, out, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.kept, kv.pairs)]
    layout = AttendLayout(
        *at,
        rows.blocks.data_ptr(),
        *(a.ctypes.data for a in (rows.token, rows.row, rows.first, rows.length)),
        None if sinks is None else sinks.data_ptr(),
        len(rows.token), heads, kv.k.shape[2], size, kv.k.shape[1], rows.blocks.stride(0), q.stride(0), kept,
        scale, TYPES[q.dtype], CODES.get(kv.k.dtype, 0), 0 if kv.kept is None else TYPES[kv.kept.dtype],
        table.bfloat16_pairs,
    )  # fmt: skip
    if threads.calls().attend(ctypes.addressof(layout), table.number, threads.launch_threads()):
        raise MemoryError(f"no memory for the sums of {len(rows.token)} rows")
