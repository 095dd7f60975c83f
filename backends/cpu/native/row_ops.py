"""Operations between products, in one pass over each row; rotary of queries and keys.

Norms and gates of 16-bit values only, for which torch takes up to nine passes; the argmax of a row of any dtype.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import checks, threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, Op
from trencadis.backends.cpu.native.layouts import RotaryLayout
from trencadis.backends.cpu.native.panels import DTYPE_NAMES, TYPES
from trencadis.core.device.backend import LayerKV

SILU_MUL, RMS_NORM, BEST = range(3)


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
    """Computes x / rms(x) * weight of rows [n, width]; a residual is first added to ``x`` in place. None: torch must do
    it.
    """
    if not table.serves(Op.ROWWISE, DTYPE_NAMES.get(x.dtype, "")) or x.dtype != weight.dtype:
        return None
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return None
    width = x.shape[-1]
    out = torch.empty_like(x)
    _run(RMS_NORM, x, residual, weight, out, x.numel() // width, width, eps, table.number)
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
    served = table.serves(Op.ROTARY, DTYPE_NAMES.get(q.dtype, ""))
    if not served or q.dtype != k.dtype or size % 2 or size < 2 * LANES:
        return None
    if q.stride(2) != 1 or k.stride(2) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
        return None
    out = q.new_empty((n, heads + k.shape[1], size))
    v, keys, values, slot = (None,) * 4 if into is None else (into.v, into.kv.k, into.kv.v, into.slot)
    if into is not None and checks.enabled():
        checks.check_range("slots of keys", into.slot, -1, into.kv.k.shape[0] * into.kv.k.shape[1])
    at = [None if t is None else t.data_ptr() for t in (q, k, v, cos, sin, out, keys, values, slot)]
    layout = RotaryLayout(
        *at, *q.stride()[:2], *k.stride()[:2], 0 if v is None else v.stride(0), heads, k.shape[1], size, TYPES[q.dtype]
    )
    threads.calls().rotate(ctypes.addressof(layout), n, table.number, threads.launch_threads())
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
