"""Computes silu(gate) * up over fused [gate | up], in float32 with one rounding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def check(gate_up: Tensor) -> None:
    """Asserts: gate_up [n, 2 width], contiguous."""
    assert gate_up.ndim == 2 and gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0, gate_up.shape


def launch(gate_up: Tensor, out: Tensor) -> None:
    """Computes gate_up [n, 2 width] -> out [n, width]."""
    check(gate_up)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _silu_mul[(n, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
