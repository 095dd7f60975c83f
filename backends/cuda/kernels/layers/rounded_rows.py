"""Activations of few rows rounded to 8 bits for a fused product, with the norm and the residual sum before it.

The values are those of ``norms`` and ``quantised_linear.round_rows`` one after the other. The codes are left as numbers
of the stream's dtype, which holds each exactly; ``skinny_quantised_gemm`` multiplies its sums by the tokens' scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.layers import dependent_launch
from trencadis.backends.cuda.kernels.layers.dependent_launch import wait
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.backends.cuda.kernels.norms import add_residual
from trencadis.backends.cuda.kernels.quantised_linear import round_code
from trencadis.backends.cuda.weights.quantised_weight import INT8, LARGEST, TINY

BLOCK = 8192
"""Maximum columns that a program holds at a time."""


def round_rows(x: Tensor, kind: int, norm: NormOf | None = None) -> tuple[Tensor, Tensor]:
    """Rounds x [n, width], contiguous, to (codes [n, width] of x's dtype, float32 scales [n]).

    Args:
        kind: ``INT8`` or ``E4M3``.
        norm: the RMS norm before it; with a residual, x + residual is normed and written to ``norm.total``.
    """
    assert x.ndim == 2 and x.is_contiguous() and kind in LARGEST, (x.shape, kind)
    codes, scale = torch.empty_like(x), torch.empty(len(x), dtype=torch.float32, device=x.device)
    added = x if norm is None or norm.residual is None else norm.residual
    total = x if norm is None or norm.total is None else norm.total
    block = min(triton.next_power_of_2(x.shape[1]), BLOCK)
    depends = dependent_launch.possible(x.device)
    rounded_rows_kernel[(len(x),)](
        codes, scale, total, x, added, x if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
        LARGEST[kind], TINY, WIDTH=x.shape[1], BLOCK=block, NORM=norm is not None,
        ADD=norm is not None and norm.residual is not None, WHOLE=kind == INT8, DEPENDENT=depends,
        num_warps=min(max(block // 512, 1), 8), **dependent_launch.options(depends),
    )  # fmt: skip
    return codes, scale


@triton.jit(do_not_specialize=["eps"])
def rounded_rows_kernel(
    codes, scale, total, x, residual, weight, eps, most, tiny, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rounds one token as ``quantised_linear.rounding_kernel`` does; its values are read again in each loop."""
    if DEPENDENT:
        wait()
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, BLOCK)
    factor = 1.0
    if NORM:
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            inside = start + lane < WIDTH
            wide = add_residual(x, residual, total, row + start + lane, inside, ADD).to(tl.float32)
            square += wide * wide
        factor = tl.rsqrt(tl.sum(square, 0) / WIDTH + eps)
    peak = tl.zeros([BLOCK], tl.float32)
    spoiled = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        value = _read_normed(x, residual, weight, factor, row, start + lane, WIDTH, NORM, ADD)
        peak = tl.maximum(peak, tl.abs(value))
        spoiled += value * 0.0
    size = tl.maximum(tl.max(peak, 0), tiny) / most
    tl.store(scale + tl.program_id(0), size + tl.sum(spoiled, 0))
    for start in range(0, WIDTH, BLOCK):
        value = _read_normed(x, residual, weight, factor, row, start + lane, WIDTH, NORM, ADD)
        code = round_code(value / size, most, WHOLE).to(codes.dtype.element_ty)
        tl.store(codes + row + start + lane, code, mask=start + lane < WIDTH)


@triton.jit
def _read_normed(x, residual, weight, factor, row, at, WIDTH: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr):
    """Returns float32 values of a row: of the stream, rounded to its dtype, and rounded again behind the norm."""
    inside = at < WIDTH
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    if NORM:
        normed = value.to(tl.float32) * factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        value = normed.to(value.dtype)
    return value.to(tl.float32)
