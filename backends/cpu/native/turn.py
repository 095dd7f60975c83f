"""Rotary of queries and keys, in one pass where the library serves."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trencadis.backends.cpu.native import threads
from trencadis.backends.cpu.native.panels import TYPES

LANES = 16
"""Half of a head has at least so many values: the widest vector."""


class TurnLayout(ctypes.Structure):
    """``Turn`` of panels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "cos", "sin", "out")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "size", "type")),
    ]


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kind: int) -> Tensor | None:
    """[n, h + g, d]: q [n, h, d] and k [n, g, d] turned, in float32 and rounded once. None: torch has to do it.

    ``cos`` and ``sin``: float32 [n, d], both halves alike.
    """
    n, heads, size = q.shape
    if not kind or q.dtype not in TYPES or q.dtype != k.dtype or size % 2 or size < 2 * LANES:
        return None
    if q.stride(2) != 1 or k.stride(2) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
        return None
    out = q.new_empty((n, heads + k.shape[1], size))
    layout = TurnLayout(
        *(t.data_ptr() for t in (q, k, cos, sin, out)), *q.stride()[:2], *k.stride()[:2], heads, k.shape[1], size,
        TYPES[q.dtype],
    )  # fmt: skip
    threads.calls().turn(ctypes.addressof(layout), n, kind, torch.get_num_threads())
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
