"""Rotary of queries and keys, in one pass where the library serves."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import checks, threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, Op
from trencadis.backends.cpu.native.layouts import TurnLayout
from trencadis.backends.cpu.native.panels import DTYPE_NAMES, TYPES
from trencadis.core.backend import LayerKV

LANES = 16
"""Half of a head has at least so many values: the widest vector."""


class StoredKeys(NamedTuple):
    """Values [n, g, d], and the slots of a cache that they and their keys are stored in, int64 [n]."""

    v: Tensor
    kv: LayerKV
    slot: Tensor


def stores(v: Tensor, kv: LayerKV) -> bool:
    """Whether ``turn`` stores: caches of ``v``'s type, and so without codes."""
    if kv.k_scale is not None or not (kv.k.dtype == kv.v.dtype == v.dtype) or kv.k.shape != kv.v.shape:
        return False
    return v.stride()[1:] == (v.shape[2], 1) and kv.k.is_contiguous() and kv.v.is_contiguous()


def turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, table: KernelTable, into: StoredKeys | None = None
) -> Tensor | None:
    """[n, h + g, d]: q [n, h, d] and k [n, g, d] turned, in float32 and rounded once. None: torch has to do it.

    Args:
        cos, sin: float32 [n, d], both halves alike.
        into: where k, turned, and v are stored; see ``stores``.
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
    layout = TurnLayout(
        *at, *q.stride()[:2], *k.stride()[:2], 0 if v is None else v.stride(0), heads, k.shape[1], size, TYPES[q.dtype]
    )
    threads.calls().turn(ctypes.addressof(layout), n, table.number, torch.get_num_threads())
    return out


def torch_turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``turn`` by torch, which rounds every step to the type of ``q``."""
    x = _joined(q, k)
    half = x.shape[-1] // 2
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None, :half]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def _joined(q: Tensor, k: Tensor) -> Tensor:
    """[n, h + g, d]: q and k; not copied if they lie side by side in a fused projection."""
    n, heads, d = q.shape
    alike = q.stride() == k.stride() and q.stride(1) == d
    behind = k.storage_offset() == q.storage_offset() + heads * d
    if alike and behind and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
        return q.as_strided((n, heads + k.shape[1], d), q.stride())
    return torch.cat([q, k], dim=1)
