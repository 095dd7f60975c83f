"""The recurrent ops by the library's kernels: a causal convolution, the gated delta rule, and a state space."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trencadis.backends.cpu.native import bounds_checks, kernel_threads
from trencadis.backends.cpu.native.ctypes_structs import ConvolutionLayout, DeltaLayout, DeltaNetLayout
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, Op
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES, TYPES
from trencadis.core.device.backend import Attn
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, RecurrentState

LANES = 16
"""Sizes of the delta rule's heads must be multiples of this, the widest vector."""

TAPS = 8
"""Maximum taps of a convolution, as in recurrent.h."""


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: RecurrentRows, attn: Attn, activation: str,
    table: KernelTable,
) -> Tensor | None:  # fmt: skip
    """Computes ``RecurrentOps.causal_conv``; None if torch must do it."""
    channels, taps = weight.shape
    served = table.serves(Op.CONVOLUTION, DTYPE_NAMES.get(x.dtype, ""))
    if not served or not 2 <= taps <= TAPS or activation not in ("silu", "") or x.stride(1) != 1:
        return None
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in (weight, state, weight if bias is None else bias)):
        return None
    _check_slots(rows, len(state))
    out = _new_output(x, rows)
    layout = ConvolutionLayout(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), state.data_ptr(), out.data_ptr(),
        *_row_fields(rows, attn), channels, taps, x.stride(0), TYPES[x.dtype], activation == "silu",
    )  # fmt: skip
    kernel_threads.calls().convolve(ctypes.addressof(layout), table.number, kernel_threads.launch_threads())
    return out


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn,
    table: KernelTable, plain: bool = False,
) -> Tensor | None:  # fmt: skip
    """Computes ``RecurrentOps.delta_rule``, or ``RecurrentOps.state_space`` if ``plain``; None if torch must do it."""
    (_, heads, dv), (_, groups, dk) = v.shape, k.shape
    served = table.serves(Op.DELTA_RULE, DTYPE_NAMES.get(v.dtype, ""))
    if not served or dk % LANES or dv % LANES or not q.dtype == k.dtype == v.dtype or not state.is_contiguous():
        return None
    if any(t.stride()[1:] != (t.shape[2], 1) for t in (q, k, v)) or g.stride(1) != 1 or beta.stride(1) != 1:
        return None
    _check_slots(rows, len(state))
    out = _new_output(v, rows)
    layout = DeltaLayout(
        *(t.data_ptr() for t in (q, k, v, g, beta, state, out)), *_row_fields(rows, attn),
        *(t.stride(0) for t in (q, k, v, g, beta)), heads, groups, dk, dv, TYPES[v.dtype], plain,
    )  # fmt: skip
    if kernel_threads.calls().delta_rule(ctypes.addressof(layout), table.number, kernel_threads.launch_threads()):
        raise MemoryError(f"no memory for chunks of {len(v)} tokens")
    return out


def delta_net(
    x: Tensor, gates: Tensor, w: DeltaNetWeights, held: RecurrentState, rows: RecurrentRows, attn: Attn,
    table: KernelTable,
) -> Tensor | None:  # fmt: skip
    """Computes ``FusedDeltaOps.delta_net`` in one call; None if its parts must be computed one by one."""
    (n, channels), (_, taps), (dv,), (heads,) = x.shape, w.conv.shape, w.norm.shape, w.decay.shape
    state, groups, dk, kind = held.state, w.key_heads, (channels - heads * dv) // (2 * w.key_heads), x.dtype
    served = all(table.serves(op, DTYPE_NAMES.get(kind, "")) for op in (Op.CONVOLUTION, Op.DELTA_RULE))
    if not served or kind == torch.float16 or state is None or not 2 <= taps <= TAPS or dk % LANES or dv % LANES:
        return None
    if any(t.dtype != kind for t in (gates, w.conv, w.norm, held.conv)) or x.stride(1) != 1 or gates.stride(1) != 1:
        return None
    if not all(t.is_contiguous() for t in (w.conv, w.norm, held.conv, state)) or int(rows.count.sum()) < n:
        return None
    _check_slots(rows, len(state))
    itemsize = kind.itemsize
    mixed, factors = n * channels * itemsize, 8 * n * heads
    room = torch.empty(factors + mixed + n * heads * dv * itemsize, dtype=torch.uint8)
    out, at = x.new_empty((n, heads * dv)), room.data_ptr()
    layout = DeltaNetLayout(
        *(t.data_ptr() for t in (x, gates, w.conv, held.conv, w.decay, w.shift, w.norm, state)),
        at + factors, at + factors + mixed, at, out.data_ptr(), *_row_fields(rows, attn), n, x.stride(0),
        gates.stride(0), taps, heads, groups, dk, dv, TYPES[kind], w.eps,
    )  # fmt: skip
    if kernel_threads.calls().delta_net(ctypes.addressof(layout), table.number, kernel_threads.launch_threads()):
        raise MemoryError(f"no memory for chunks of {n} tokens")
    return out


def _new_output(x: Tensor, rows: RecurrentRows) -> Tensor:
    """Returns memory for results of x's shape; zeros if the launch has padding, which kernels do not write."""
    padded = int(rows.count.sum()) < len(x)
    return x.new_zeros(x.shape) if padded else x.new_empty(x.shape)


def _row_fields(rows: RecurrentRows, attn: Attn) -> tuple[int, ...]:
    return (
        rows.slot.data_ptr(), rows.source.data_ptr(), rows.begins.data_ptr(), attn.row_start.data_ptr(),
        rows.count.data_ptr(), len(rows.count),
    )  # fmt: skip


def _check_slots(rows: RecurrentRows, slots: int) -> None:
    if bounds_checks.enabled():
        bounds_checks.check_range("slots of states", rows.slot, 0, slots)
        bounds_checks.check_range("sources of states", rows.source, 0, slots)
