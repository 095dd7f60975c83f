"""RMS norm and layer norm with the residual sum: total = x + residual, out = total / rms(total) * weight, or
(total - mean) / deviation * weight + bias; and rows times their gates, with such a norm or without.

The sum is rounded to the stream's dtype before it is normed, because the next layer reads that; the norm itself is
float32 with one rounding at the end. The deviation is computed after the mean is subtracted: a difference of two sums
of squares would lose the digits of a stream far from zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_residual(x, residual, total, at, inside, ADD: tl.constexpr):
    """Returns x, or with ``ADD`` x + residual in its dtype, which is stored in ``total``."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, mask=inside)
    return value


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(x, residual, weight, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = add_residual(x, residual, total, row + at, inside, ADD)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, normed.to(value.dtype), mask=inside)


def check_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Asserts: x and residual [n, width] and weight [width], contiguous and of one dtype; the weight may be float32."""
    assert x.ndim == 2 and x.is_contiguous() and x.shape[1] <= 16384, x.shape
    assert weight.shape == x.shape[1:] and weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous())


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Tensor) -> None:
    """Computes the RMS norm: writes ``total`` and ``out`` [n, width] from x and residual [n, width] and weight [width].

    Without a residual ``total`` is not written.
    """
    check_norm(x, residual, weight)
    n, width = x.shape
    if n:
        block = triton.next_power_of_2(width)
        _rms_norm[(n,)](
            x, x if residual is None else residual, weight, total, out, eps, WIDTH=width, BLOCK=block,
            ADD=residual is not None, num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip


@triton.jit(do_not_specialize=["eps"])
def _layer_norm(
    x, residual, weight, bias, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = add_residual(x, residual, total, row + at, inside, ADD)
    wide = value.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    scaled = centred * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scaled += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(value.dtype), mask=inside)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, total: Tensor, out: Tensor
) -> None:
    """Computes the layer norm: writes ``total`` and ``out`` [n, width] from x and residual [n, width], weight and bias
    [width].

    Without a residual ``total`` is not written.
    """
    check_norm(x, residual, weight)
    assert bias.shape == weight.shape and bias.dtype == x.dtype and bias.is_contiguous()
    n, width = x.shape
    if n:
        block = triton.next_power_of_2(width)
        _layer_norm[(n,)](
            x, x if residual is None else residual, weight, bias, total, out, eps, WIDTH=width, BLOCK=block,
            ADD=residual is not None, num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip


GATED_VALUES = 2048
"""Values that a program of ``gate_rows`` holds at a time."""


def gate_rows(x: Tensor, gate: Tensor, norm: Tensor | None, eps: float, out: Tensor) -> None:
    """Writes x [n, heads, width] times the sigmoid of ``gate`` to ``out``, or, with a norm, the RMS norm of each head,
    rounded to its dtype, times the SiLU of ``gate``. Products are float32, with one rounding.

    Args:
        x: contiguous, like ``out``.
        gate: [n, heads, width], whose last dimension is contiguous.
        norm: [width].
    """
    n, heads, width = x.shape
    assert x.is_contiguous() and out.is_contiguous() and gate.shape == x.shape and gate.stride(2) == 1
    assert norm is None or (norm.shape == (width,) and norm.is_contiguous())
    block = triton.next_power_of_2(width)
    each = max(GATED_VALUES // block, 1)
    if n:
        _gate_rows[(-(-n * heads // each),)](
            x, gate, x if norm is None else norm, out, n * heads, eps, HEADS=heads, WIDTH=width,
            GATE_TOKEN=gate.stride(0), GATE_HEAD=gate.stride(1), BLOCK=block, EACH=each, NORM=norm is not None,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "eps"])
def _gate_rows(
    x, gate, norm, out, rows, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, GATE_TOKEN: tl.constexpr,
    GATE_HEAD: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (at < WIDTH)
    value = tl.load(x + row[:, None] * WIDTH + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    place = (row // HEADS * GATE_TOKEN + row % HEADS * GATE_HEAD)[:, None]
    opened = tl.load(gate + place + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        wide = (wide * scale * tl.load(norm + at, mask=at < WIDTH, other=0.0).to(tl.float32)).to(value.dtype)
        wide = wide.to(tl.float32) * opened
    tl.store(out + row[:, None] * WIDTH + at, (wide * tl.sigmoid(opened)).to(value.dtype), mask=inside)
