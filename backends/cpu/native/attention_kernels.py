"""Attention by the library's kernels: decoding rows, and many queries of prompts, windows and images.

Queries, keys and values are read in place, from blocks of the cache or a fused projection, and scores never leave the
cache of a core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.native import checks, threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, Op
from trencadis.backends.cpu.native.layouts import AttendLayout, FlashLayout
from trencadis.backends.cpu.native.panels import DTYPE_NAMES, TYPES
from trencadis.core.device.backend import LayerKV

LANES = 16
"""Values of a head must be a multiple of this, the widest vector."""

WIDEST_DECODE = 512
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


def can_decode(q: Tensor, kv: LayerKV, table: KernelTable) -> bool:
    """Returns True if the kernel supports the cache: values of ``q``'s dtype, or 8-bit codes with scales."""
    size = kv.k.shape[-1]
    if size % LANES or size > WIDEST_DECODE or not table.serves(Op.DECODE_ATTENTION, DTYPE_NAMES.get(q.dtype, "")):
        return False
    coded = kv.k_scale is not None and kv.k.dtype in CODES
    return (coded or kv.k.dtype == q.dtype) and kv.k.is_contiguous() and kv.v.is_contiguous()


def attend_decode(
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


WIDEST = 512
"""Maximum values of a head."""

Where = slice | Tensor
"""Rows or slots: a slice, or int64 indices."""


@dataclass(frozen=True)
class Span:
    """Queries in the rows ``queries`` that attend to keys in the slots ``keys``.

    Args:
        first_key: position of the first key; the others follow.
        first_query: position of the first query; the others follow.
        upto: int32 [queries], the last position that each query sees; None: its own.
        whole: every query sees every key.
    """

    queries: Where
    keys: Where
    first_key: int = 0
    first_query: int = 0
    upto: Tensor | None = None
    whole: bool = False

    def numbers(self) -> tuple[int, ...]:
        """Returns the fields of ``Span`` of flash.h."""
        assert self.upto is None or (self.upto.dtype == torch.int32 and self.upto.is_contiguous())
        upto = 0 if self.upto is None else self.upto.data_ptr()
        return (*_lies(self.queries), *_lies(self.keys), self.first_key, self.first_query, upto, int(self.whole))


def _lies(where: Where) -> tuple[int, int, int]:
    """Returns (first row, number of rows, address of indices or 0)."""
    if isinstance(where, slice):
        return where.start, where.stop - where.start, 0
    assert where.dtype == torch.int64 and where.is_contiguous()
    return 0, len(where), where.data_ptr()


def can_attend(q: Tensor, table: KernelTable, op: Op = Op.ATTENTION) -> bool:
    """Returns True if the kernel supports ``q``'s dtype and head size, and ``table`` chooses it for ``op``."""
    return q.shape[-1] <= WIDEST and table.serves(op, DTYPE_NAMES.get(q.dtype, ""))


def window_spans(real: Tensor, size: int) -> NDArray[np.int64]:
    """Returns the spans of windows of ``size`` rows, of which the first ``real`` (int32 [windows]) attend to each
    other.
    """
    made = np.zeros((len(real), 10), np.int64)
    made[:, 0] = made[:, 3] = np.arange(0, len(real) * size, size)
    made[:, 1] = made[:, 4] = real.numpy()
    made[:, 9] = 1
    return made


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span] | NDArray[np.int64], scale: float, out: Tensor,
    table: KernelTable, window: int = 0, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes attention of q [n, h, d] to k and v [slots, g, d]; ``out`` [n, h, d] is written for the queries of
    spans.

    A query's bits depend only on itself and on the keys that it sees, at their positions. Softmax and sums are float32.
    ``sinks``: float32 [h], as for ``Ops.attend``.
    """
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    assert out.is_contiguous() and k.dtype == v.dtype == q.dtype == out.dtype
    made = spans if isinstance(spans, np.ndarray) else np.array([span.numbers() for span in spans], np.int64)
    if checks.enabled():
        checks.check_spans(made, len(q), len(k))
        for span in spans if not isinstance(spans, np.ndarray) else ():
            for what, where, most in (("queries", span.queries, len(q)), ("slots", span.keys, len(k))):
                if isinstance(where, Tensor):
                    checks.check_range(f"{what} of a span", where, 0, most)
    _, heads, size = q.shape
    layout = FlashLayout(
        *(t.data_ptr() for t in (q, k, v, out)), None if sinks is None else sinks.data_ptr(),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        heads, k.shape[1], size, window, made.ctypes.data, len(made), TYPES[q.dtype], scale,
        q.dtype == torch.bfloat16 and table.bfloat16_pairs, None, 0, 0, 0,
    )  # fmt: skip
    if threads.calls().flash(ctypes.addressof(layout), table.number, threads.launch_threads()):
        raise MemoryError(f"no memory for the attention of {len(made)} spans")
