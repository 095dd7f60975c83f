"""Activations rounded to 8 bits, alone or within the operation before them: RMS norm with its residual sum, or SiLU
times up.

The values are those of ``norms`` or ``activation`` followed by a rounding of their results, bit for bit: what is normed
is rounded to the stream's dtype first, as if it were stored. A token has one scale, or one for each group of its
columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.activation import check_silu_mul
from trencadis.backends.cuda.kernels.layers import dependent_launch
from trencadis.backends.cuda.kernels.layers.dependent_launch import wait
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.backends.cuda.kernels.norms import add_residual, check_norm
from trencadis.backends.cuda.weights.quantised_weight import E4M3, INT8, LARGEST, SHIFTED, TINY
from trencadis.core.quant.quantised_weight_layout_and_bytes import FOURS

BLOCK = 8192
"""Maximum columns that a program holds at a time, half of it of gates and ups; behind a norm, whose sum has one order,
all.
"""

_NEAREST = tl.constexpr(12582912.0)
"""1.5 x 2^23: adding it to a float32 and subtracting it again rounds to the nearest integer."""


class Rounding(NamedTuple):
    """How a product's activations are rounded.

    Args:
        kind: ``INT8`` or ``E4M3``.
        to: dtype of the codes: int8, float8_e4m3fn, or a float type that holds the codes' values.
        group: columns that share a scale; 0: a scale for each token.
        values: with groups: codes times their scales, in ``to``, for products that know no scales of activations.
    """

    kind: int
    to: torch.dtype
    group: int = 0
    values: bool = False


class RoundedRows(NamedTuple):
    """Activations [rows, width] of ``dtype`` that were rounded.

    Args:
        codes: [rows, width], or with groups [rows filled up to ``FOURS``, width].
        scale: float32 [rows], or [groups, rows filled up]. Those of float8 with a scale for each token are divided by
            ``SHIFTED``, by which the factors of such weights are too large.
    """

    codes: Tensor
    scale: Tensor
    rounding: Rounding
    rows: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return self.rows, self.codes.shape[1]


def round_rows(x: Tensor, to: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds x to (codes [n, in], float32 scales [n]): int8, or e4m3's values in ``to``."""
    rounded = round_to(x, Rounding(INT8 if to == torch.int8 else E4M3, to))
    return rounded.codes, rounded.scale


def round_few(x: Tensor, kind: int, norm: NormOf | None = None) -> tuple[Tensor, Tensor]:
    """Rounds x [n, width] of a fused layer, which waits for the launch before it, to (codes [n, width], float32 scales
    [n]). Codes have x's dtype; those of e4m3 in bfloat16 are float16, to which cards convert a weight's codes in a
    quarter of the instructions.
    """
    held = torch.float16 if kind == E4M3 and x.dtype == torch.bfloat16 else x.dtype
    rounded = round_to(x, Rounding(kind, held), norm, dependent=True)
    return rounded.codes, rounded.scale


def round_to(
    x: Tensor, how: Rounding, norm: NormOf | None = None, gate: bool = False, dependent: bool = False
) -> RoundedRows:
    """Rounds x [n, width], contiguous.

    Args:
        norm: the RMS norm before it; with a residual, x + residual is normed and written to ``norm.total``.
        gate: x is [n, 2 width], fused [gate | up], and SiLU of the gate times up is rounded.
        dependent: the launch may start while the one before it ends, where the card can.
    """
    assert x.ndim == 2 and x.is_contiguous() and how.kind in LARGEST and not (gate and norm), (x.shape, how)
    if gate:
        check_silu_mul(x)
    n, width = x.shape[0], x.shape[1] // 2 if gate else x.shape[1]
    if norm is not None:
        check_norm(x, norm.residual, norm.weight)
    assert not how.group or width % how.group == 0, (width, how)
    scaled = how.group > 0 and not how.values
    filled = -(-n // FOURS) * FOURS if scaled else n
    bits = how.to == torch.float8_e4m3fn
    codes = torch.empty((filled, width), dtype=torch.uint8 if bits else how.to, device=x.device)
    scale = torch.empty((width // how.group, filled) if scaled else filled, dtype=torch.float32, device=x.device)
    added = x if norm is None or norm.residual is None else norm.residual
    total = x if norm is None or norm.total is None else norm.total
    whole = triton.next_power_of_2(width)
    block = max(whole if norm is not None else min(whole, BLOCK // 2 if gate else BLOCK), how.group)
    depends = dependent and dependent_launch.possible(x.device)
    if filled:
        rounded_rows_kernel[(filled,)](
            codes, scale, total, x, added, x if norm is None else norm.weight, n, filled,
            0.0 if norm is None else norm.eps, LARGEST[how.kind], TINY, SHIFTED if bits and not how.group else 1.0,
            WIDTH=width, BLOCK=block, GROUP=how.group, NORM=norm is not None,
            ADD=norm is not None and norm.residual is not None, GATE=gate, WHOLE=how.kind == INT8, BITS=bits,
            VALUES=how.values, DEPENDENT=depends, num_warps=min(max(block // 512, 1), 8),
            **dependent_launch.options(depends),
        )  # fmt: skip
    return RoundedRows(codes.view(how.to), scale, how, n, x.dtype)


@triton.jit(do_not_specialize=["rows", "filled", "eps", "most", "tiny", "unit"])
def rounded_rows_kernel(
    codes, scale, total, x, residual, weight, rows, filled, eps, most, tiny, unit, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    WHOLE: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rounds one token so that its largest magnitude, or that of each group, gets the largest code. A non-finite value
    makes its scale, and so its row, non-finite. Rows of zeros fill up the last four.
    """
    if DEPENDENT:
        wait()
    row = tl.program_id(0).to(tl.int64)
    end = tl.where(row < rows, WIDTH, 0)
    lane = tl.arange(0, BLOCK)
    factor = 1.0
    if NORM:
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            inside = start + lane < end
            wide = add_residual(x, residual, total, row * WIDTH + start + lane, inside, ADD).to(tl.float32)
            square += wide * wide
        factor = tl.rsqrt(tl.sum(square, 0) / WIDTH + eps)
    if GROUP:
        EACH: tl.constexpr = BLOCK // GROUP
        for start in range(0, WIDTH, BLOCK):
            number = start // GROUP + tl.arange(0, EACH)
            at = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            value = read_values(x, residual, weight, factor, row, at, end, WIDTH, NORM, ADD, GATE)
            size = tl.maximum(tl.max(tl.abs(value), 1), tiny) / most
            size_or_nan = size + tl.sum(value * 0.0, 1)
            code = round_code(value / size[:, None], most, WHOLE)
            if VALUES:
                code = code * size_or_nan[:, None]
            else:
                tl.store(scale + number.to(tl.int64) * filled + row, size_or_nan, mask=number < WIDTH // GROUP)
            store_codes(codes, code, row, at, WIDTH, BITS)
    elif BLOCK >= WIDTH:
        value = read_values(x, residual, weight, factor, row, lane, end, WIDTH, NORM, ADD, GATE)
        size = tl.maximum(tl.max(tl.abs(value), 0), tiny) / most
        tl.store(scale + row, (size + tl.sum(value * 0.0, 0)) / unit)
        store_codes(codes, round_code(value / size, most, WHOLE), row, lane, WIDTH, BITS)
    else:
        peak = tl.zeros([BLOCK], tl.float32)
        spoiled = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            value = read_values(x, residual, weight, factor, row, start + lane, end, WIDTH, NORM, ADD, GATE)
            peak = tl.maximum(peak, tl.abs(value))
            spoiled += value * 0.0
        size = tl.maximum(tl.max(peak, 0), tiny) / most
        tl.store(scale + row, (size + tl.sum(spoiled, 0)) / unit)
        for start in range(0, WIDTH, BLOCK):
            value = read_values(x, residual, weight, factor, row, start + lane, end, WIDTH, NORM, ADD, GATE)
            store_codes(codes, round_code(value / size, most, WHOLE), row, start + lane, WIDTH, BITS)


@triton.jit
def read_values(
    x, residual, weight, factor, row, at, end, WIDTH: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Returns float32 values of columns ``at`` of a row that ends before column ``end``, and zeros beyond: of the
    stream, rounded to its dtype, and rounded again behind the norm; or of SiLU times up, rounded.
    """
    inside = at < end
    if GATE:
        gate = tl.load(x + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        return (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0)
        if ADD:
            other = tl.load(residual + row * WIDTH + at, mask=inside, other=0.0)
            value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        if NORM:
            normed = value.to(tl.float32) * factor * tl.load(weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            value = normed.to(value.dtype)
        return value.to(tl.float32)


@triton.jit
def store_codes(codes, code, row, at, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Stores float32 codes of a row in the dtype of ``codes``; e4m3 as their bits."""
    if BITS:
        code = bits_of(code)
    tl.store(codes + row * WIDTH + at, code.to(codes.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def round_code(value, most, WHOLE: tl.constexpr):
    """Rounds values, clamped to ``most`` either way, to whole numbers or to numbers of e4m3."""
    value = tl.where(tl.abs(value) <= most, value, tl.where(value > 0, most, -most))
    return (value + _NEAREST) - _NEAREST if WHOLE else float8(value)


@triton.jit
def float8(value):
    """Rounds float32 values up to 448 to the nearest e4m3: three bits after the leading one, down to steps of 2^-9."""
    power = tl.maximum(((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 3, 118)
    step, inverse = (power << 23).to(tl.float32, bitcast=True), ((254 - power) << 23).to(tl.float32, bitcast=True)
    return ((value * inverse + _NEAREST) - _NEAREST) * step


@triton.jit
def bits_of(value):
    """Returns int32 codes of e4m3 values in float32: exponents count from 2^-7, and below 2^-6 codes are multiples of
    2^-9.
    """
    size = tl.abs(value)
    normal = (size.to(tl.int32, bitcast=True) >> 20) - 960
    code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    return tl.where(value < 0, code | 0x80, code)
