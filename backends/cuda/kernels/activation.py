"""Activations of [n, width], or of the first half of [n, 2 width] times the second; float32 with one rounding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "clamped_swiglu": 5, "relu2": 6}
"""Activations of ``core.device.backend.Ops.act`` -> their number in the kernel."""


@triton.jit
def apply_activation(value, KIND: tl.constexpr):
    """Returns the activation of float32 values of any shape."""
    if KIND == 0:
        value = value / (1.0 + tl.exp(-value))
    elif KIND == 1:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == 2:
        # 0.5 (1 + tanh u) is 1 / (1 + exp(-2 u)); some Triton releases have no tanh.
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(-2.0 * inner))
    elif KIND == 3:
        value = value / (1.0 + tl.exp(-1.702 * value))
    elif KIND == 4:
        value = tl.where(value < 0.0, 0.0, value)  # a maximum would drop a NaN
    elif KIND == 6:
        value = tl.where(value < 0.0, 0.0, value * value)
    else:
        value = tl.where(value > 7.0, 7.0, value)
        value = value / (1.0 + tl.exp(-1.702 * value))
    return value


@triton.jit
def adjust_up(value, KIND: tl.constexpr):
    """Returns what the activation of a gate is multiplied by, from float32 values of the second half."""
    if KIND == 5:
        value = tl.where(value > 7.0, 7.0, value)
        value = tl.where(value < -7.0, -7.0, value) + 1.0
    return value


@triton.jit
def _act(source, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PAIRED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    step = 2 * WIDTH if PAIRED else WIDTH
    value = tl.load(source + row * step + at, mask=inside, other=0.0).to(tl.float32)
    value = apply_activation(value, KIND)
    if PAIRED:
        up = tl.load(source + row * step + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        value *= adjust_up(up, KIND)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def check(source: Tensor, kind: str, paired: bool, out: Tensor) -> None:
    """Asserts: source [n, width] or, paired, [n, 2 width], and out [n, width], contiguous."""
    assert kind in KINDS, kind
    assert source.ndim == 2 and source.is_contiguous() and out.is_contiguous() and out.dtype == source.dtype
    assert source.shape == (out.shape[0], out.shape[1] * (2 if paired else 1)), (source.shape, out.shape)


def launch(source: Tensor, kind: str, paired: bool, out: Tensor) -> None:
    """Computes source [n, width] or, ``paired``, [n, 2 width] -> out [n, width]; ``kind`` is one of KINDS."""
    check(source, kind, paired, out)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _act[(n, triton.cdiv(width, block))](
            source, out, WIDTH=width, BLOCK=block, KIND=KINDS[kind], PAIRED=paired, num_warps=4
        )


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def check_silu_mul(gate_up: Tensor) -> None:
    """Asserts: gate_up [n, 2 width], contiguous."""
    assert gate_up.ndim == 2 and gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0, gate_up.shape


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Computes silu(gate) * up: gate_up [n, 2 width], fused [gate | up], -> out [n, width]."""
    check_silu_mul(gate_up)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _silu_mul[(n, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
