"""Kernels that are no products: operations on rows, rotary of queries and keys, and attention.

Operations between products take one pass over each row: norms and gates of 16-bit values only, for which torch takes up
to nine passes; the argmax of a row of any dtype.

Attention reads queries, keys and values in place, from blocks of the cache or a fused projection, and scores never
leave the cache of a core; it serves decoding rows, and many queries of prompts, windows and images.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.native import bounds_checks, kernel_threads
from trencadis.backends.cpu.native.ctypes_structs import AttendLayout, FlashLayout, RotaryLayout
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, Op
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES, TYPES
from trencadis.core.device.backend import LayerKV

SILU_MUL, RMS_NORM, BEST, WIDE_NORM = range(4)
CLAMPED_SWIGLU = 6
"""Numbers of operations in panels.h."""


def silu_mul(gate_up: Tensor, table: KernelTable) -> Tensor | None:
    """Computes silu of the first half of each row times the second: [n, 2 width] -> [n, width]. None: torch must do
    it.
    """
    return _act_mul(SILU_MUL, gate_up, table)


def clamped_swiglu(gate_up: Tensor, table: KernelTable) -> Tensor | None:
    """Computes gpt-oss' activation of rows: [n, 2 width] -> [n, width], rounded once. None: torch must do it."""
    return _act_mul(CLAMPED_SWIGLU, gate_up, table)


def _act_mul(op: int, gate_up: Tensor, table: KernelTable) -> Tensor | None:
    """Computes a gated activation by its number in panels.h: [n, 2 width] -> [n, width]. None: torch must do it."""
    if (Op.ROWWISE, DTYPE_NAMES.get(gate_up.dtype, "")) not in table.rows or not gate_up.is_contiguous():
        return None
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((n, width))
    _run(op, gate_up, None, None, out, n, width, 0.0, table.number)
    return out


def _norm_op(x: Tensor, weight: Tensor, table: KernelTable) -> int | None:
    """Returns the operation that norms ``x`` with a weight of its type, or of float32; None: torch must do it."""
    if (Op.ROWWISE, DTYPE_NAMES.get(x.dtype, "")) not in table.rows:
        return None
    return RMS_NORM if weight.dtype == x.dtype else WIDE_NORM if weight.dtype == torch.float32 else None


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, table: KernelTable) -> Tensor | None:
    """Computes x / rms(x) * weight of rows [n, width], in which a float32 weight is multiplied before the norm is
    rounded; a residual is first added to ``x`` in place. None: torch must do it.
    """
    op = _norm_op(x, weight, table)
    if op is None:
        return None
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return None
    width = x.shape[-1]
    out = torch.empty_like(x)
    _run(op, x, residual, weight, out, x.numel() // width, width, eps, table.number)
    return out


def norm_heads(x: Tensor, weight: Tensor, eps: float, table: KernelTable) -> Tensor | None:
    """Returns the norm of each head of x [n, heads, width], which may lie apart; see ``rms_norm``."""
    n, heads, width = x.shape
    op = _norm_op(x, weight, table)
    if op is None:
        return None
    if x.stride(2) != 1:
        return None
    out = x.new_empty((n, heads, width))
    kernel_threads.calls().head_norms(
        op, x.data_ptr(), weight.data_ptr(), out.data_ptr(), n * heads, width, heads,
        x.stride(0), x.stride(1), eps, TYPES[x.dtype], table.number, kernel_threads.launch_threads(),
    )  # fmt: skip
    return out


def gate_heads(x: Tensor, gate: Tensor, table: KernelTable) -> Tensor | None:
    """Returns x [n, heads, width] times the sigmoid of ``gate``, whose heads may lie apart; None: torch must do it."""
    n, heads, width = x.shape
    if (Op.ROWWISE, DTYPE_NAMES.get(x.dtype, "")) not in table.rows or gate.dtype != x.dtype:
        return None
    if not x.is_contiguous() or gate.stride(2) != 1:
        return None
    out = x.new_empty((n, heads, width))
    kernel_threads.calls().gate_heads(
        x.data_ptr(), gate.data_ptr(), out.data_ptr(), n * heads, width, heads, gate.stride(0), gate.stride(1),
        TYPES[x.dtype], table.number, kernel_threads.launch_threads(),
    )  # fmt: skip
    return out


def gated_norm(y: Tensor, weight: Tensor, eps: float, gate: Tensor, table: KernelTable) -> Tensor | None:
    """Computes ``RecurrentOps.gated_norm``; None: torch must do it."""
    n, heads, width = y.shape
    if (Op.ROWWISE, DTYPE_NAMES.get(y.dtype, "")) not in table.rows or not y.dtype == weight.dtype == gate.dtype:
        return None
    if not y.is_contiguous() or gate.stride(1) != 1:
        return None
    out = y.new_empty((n, heads * width))
    kernel_threads.calls().gated_norm(
        y.data_ptr(), weight.data_ptr(), gate.data_ptr(), out.data_ptr(), n * heads, width, heads, gate.stride(0), eps,
        TYPES[y.dtype], table.number, kernel_threads.launch_threads(),
    )  # fmt: skip
    return out


def best(logits: Tensor, table: KernelTable) -> Tensor | None:
    """Returns int64 [n]: the index of the first largest value of each row [n, width]. None: torch must find it."""
    served = (Op.ARGMAX, DTYPE_NAMES.get(logits.dtype, "")) in table.rows
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
    kernel_threads.calls().rows(
        op, x.data_ptr(), None if residual is None else residual.data_ptr(),
        None if weight is None else weight.data_ptr(), out.data_ptr(), n, width, eps, TYPES[x.dtype], kind,
        kernel_threads.launch_threads(),
    )  # fmt: skip


LANES = 16
"""Minimum values of half a head: the widest vector."""


class StoredKeys(NamedTuple):
    """Values [n, g, d], and the cache slots, int64 [n], in which they and their keys are stored."""

    v: Tensor
    kv: LayerKV
    slot: Tensor


def can_store(v: Tensor, kv: LayerKV) -> bool:
    """Returns True if ``rotate`` can also store to the cache: it has ``v``'s dtype, and so no codes."""
    if kv.k_scale is not None or not (kv.k.dtype == kv.v.dtype == v.dtype) or kv.k.shape != kv.v.shape:
        return False
    return v.stride()[1:] == (v.shape[2], 1) and kv.k.is_contiguous() and kv.v.is_contiguous()


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, table: KernelTable, into: StoredKeys | None = None
) -> Tensor | None:
    """Rotates q [n, h, d] and k [n, g, d] in float32, rounds once and returns them joined, [n, h + g, d].

    None if torch must do it.

    Args:
        cos, sin: float32 [n, d], both halves equal.
        into: where k, rotated, and v are stored; see ``can_store``.
    """
    n, heads, size = q.shape
    served = (Op.ROTARY, DTYPE_NAMES.get(q.dtype, "")) in table.rows
    if not served or q.dtype != k.dtype or size % 2 or size < 2 * LANES:
        return None
    if q.stride(2) != 1 or k.stride(2) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
        return None
    out = q.new_empty((n, heads + k.shape[1], size))
    v, stride, keys, values, slot = None, 0, None, None, None
    if into is not None:
        if bounds_checks.enabled():
            bounds_checks.check_range("slots of keys", into.slot, -1, into.kv.k.shape[0] * into.kv.k.shape[1])
        v, stride = into.v.data_ptr(), into.v.stride(0)
        keys, values, slot = into.kv.k.data_ptr(), into.kv.v.data_ptr(), into.slot.data_ptr()
    layout = RotaryLayout(
        q.data_ptr(), k.data_ptr(), v, cos.data_ptr(), sin.data_ptr(), out.data_ptr(), keys, values, slot,
        *q.stride()[:2], *k.stride()[:2], stride, heads, k.shape[1], size, TYPES[q.dtype],
    )  # fmt: skip
    kernel_threads.calls().rotate(ctypes.addressof(layout), n, table.number, kernel_threads.launch_threads())
    return out


def torch_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Does ``rotate`` by torch, which rounds every step to the dtype of ``q``."""
    x = _join_heads(q, k)
    half = x.shape[-1] // 2
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None, :half]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def _join_heads(q: Tensor, k: Tensor) -> Tensor:
    """Joins q and k to [n, h + g, d]; without a copy if they are adjacent in a fused projection."""
    n, heads, d = q.shape
    alike = q.stride() == k.stride() and q.stride(1) == d
    adjacent = k.storage_offset() == q.storage_offset() + heads * d
    if alike and adjacent and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
        return q.as_strided((n, heads + k.shape[1], d), q.stride())
    return torch.cat([q, k], dim=1)


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
    if size % LANES or size > WIDEST_DECODE or (Op.DECODE_ATTENTION, DTYPE_NAMES.get(q.dtype, "")) not in table.rows:
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
    if bounds_checks.enabled():
        bounds_checks.check_range("rows of queries", rows.token, 0, len(q))
        bounds_checks.check_blocks(rows.blocks, rows.row, rows.first, rows.length, kv.k.shape[1], kv.k.shape[0])
    kept = 0 if kv.kept is None else kv.kept.shape[-1]
    layout = AttendLayout(
        q.data_ptr(), out.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(),
        None if kv.k_scale is None else kv.k_scale.data_ptr(),
        None if kv.v_scale is None else kv.v_scale.data_ptr(),
        None if kv.kept is None else kv.kept.data_ptr(),
        None if kv.pairs is None else kv.pairs.data_ptr(),
        rows.blocks.data_ptr(),
        rows.token.ctypes.data, rows.row.ctypes.data, rows.first.ctypes.data, rows.length.ctypes.data,
        None if sinks is None else sinks.data_ptr(),
        len(rows.token), heads, kv.k.shape[2], size, kv.k.shape[1], rows.blocks.stride(0), q.stride(0), kept,
        scale, TYPES[q.dtype], CODES.get(kv.k.dtype, 0), 0 if kv.kept is None else TYPES[kv.kept.dtype],
        table.bfloat16_pairs,
    )  # fmt: skip
    if kernel_threads.calls().attend(ctypes.addressof(layout), table.number, kernel_threads.launch_threads()):
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
        ranges = (*_row_range(self.queries), *_row_range(self.keys))
        return (*ranges, self.first_key, self.first_query, upto, int(self.whole))


class RowRange(NamedTuple):
    """Rows of a tensor as flash.h takes them: ``length`` rows from ``first`` on, or those listed at ``indices``."""

    first: int
    length: int
    indices: int  # address of int64 [length]; 0: consecutive rows


def _row_range(where: Where) -> RowRange:
    if isinstance(where, slice):
        return RowRange(where.start, where.stop - where.start, 0)
    assert where.dtype == torch.int64 and where.is_contiguous()
    return RowRange(0, len(where), where.data_ptr())


def can_attend(q: Tensor, table: KernelTable, op: Op = Op.ATTENTION) -> bool:
    """Returns True if the kernel supports ``q``'s dtype and head size, and ``table`` chooses it for ``op``."""
    return q.shape[-1] <= WIDEST and (op, DTYPE_NAMES.get(q.dtype, "")) in table.rows


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
    if bounds_checks.enabled():
        bounds_checks.check_spans(made, len(q), len(k))
        for span in spans if not isinstance(spans, np.ndarray) else ():
            for what, where, most in (("queries", span.queries, len(q)), ("slots", span.keys, len(k))):
                if isinstance(where, Tensor):
                    bounds_checks.check_range(f"{what} of a span", where, 0, most)
    _, heads, size = q.shape
    layout = FlashLayout(
        *(t.data_ptr() for t in (q, k, v, out)), None if sinks is None else sinks.data_ptr(),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        heads, k.shape[1], size, window, made.ctypes.data, len(made), TYPES[q.dtype], scale,
        q.dtype == torch.bfloat16 and table.bfloat16_pairs, None, 0, 0, 0,
    )  # fmt: skip
    if kernel_threads.calls().flash(ctypes.addressof(layout), table.number, kernel_threads.launch_threads()):
        raise MemoryError(f"no memory for the attention of {len(made)} spans")
