"""Products of few rows with quantised weights, fused with the operations around them as ``skinny_gemm`` fuses dense
ones: norm and its sum, bias, SiLU product, residual.

Codes are read once, as they are stored, and decoded on the way into the tensor cores (``quantised_linear``). Columns
are cut, and pieces added, as in ``skinny_gemm``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import quantised_linear
from trencadis.backends.cuda.kernels.layers import dependent_launch, skinny_gemm
from trencadis.backends.cuda.kernels.layers.dependent_launch import fetch, wait
from trencadis.backends.cuda.kernels.layers.skinny_gemm import LINES, NormOf, _add_residual, _finish
from trencadis.backends.cuda.kernels.quantised_linear import decode_numbers, split_codes
from trencadis.backends.cuda.weights.quantised_weight import INT4, SHIFTED, QuantisedWeight

_INT4, _SHIFTED = tl.constexpr(INT4), tl.constexpr(SHIFTED)
LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


def fits(w: QuantisedWeight) -> bool:
    """True if ``product`` takes the weight: its columns are in order, its rows begin on 16 bytes, and activations are
    not rounded.
    """
    plain = w.gather is None and not w.rounds and w.columns == w.in_features
    return plain and w.codes.shape[1] % 16 == 0 and w.out_features <= 16 * skinny_gemm.COUNTERS


def product(
    x: Tensor, w: QuantisedWeight, arrived: Tensor, norm: NormOf | None = None, gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies as ``skinny_gemm.product`` does, by codes."""
    n, features = x.shape[0], w.out_features // (2 if gate else 1)
    assert fits(w) and x.ndim == 2 and 0 < n <= skinny_gemm.FEW and x.shape[1] == w.in_features and x.is_contiguous()
    step = quantised_linear.span(w)
    tile, cut, each, count, out, sums, squares, added, total = skinny_gemm.make_parts(
        x, features, w.columns, step, arrived, norm, gate
    )
    depends = dependent_launch.possible(x.device)
    coded_skinny_kernel[(count, cut)](
        out, total, sums, squares, arrived, x, added, x if norm is None else norm.weight, w.codes, w.factor,
        w.factor if w.scale is None else w.scale, w.factor if w.zero is None else w.zero,
        out if w.bias is None else w.bias, x if residual is None else residual, n, 0.0 if norm is None else norm.eps,
        COLUMNS=w.columns, FEATURES=features, WIDTH=w.codes.shape[1], PIECES=cut, STEPS=each, KIND=w.kind,
        GROUP=w.group, ZERO=w.zero is not None, NORM=norm is not None,
        ADD=norm is not None and norm.residual is not None, GATE=gate, BIAS=w.bias is not None,
        RESIDUAL=residual is not None, NARROW=x.dtype == torch.float16, PACKED=quantised_linear.is_packed(x.dtype),
        CONVERTS=quantised_linear.converts(w, x.device), DEPENDENT=depends, M=tile.m, N=tile.n, STEP=step,
        num_warps=tile.warps, num_stages=tile.stages, **dependent_launch.options(depends),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "eps"])
def coded_skinny_kernel(
    out, total, sums, squares, arrived, x, added, norm, codes, factor, scale, zero, bias, residual, rows, eps,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NARROW: tl.constexpr, PACKED: tl.constexpr,
    CONVERTS: tl.constexpr, DEPENDENT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = STEP // 2 if KIND == _INT4 else STEP
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    feature = tile * N + tl.arange(0, N)
    there = feature < FEATURES
    first = piece * STEPS
    if DEPENDENT:
        line = tl.minimum(first * SIZE + tl.arange(0, LINES) * LINE, WIDTH - 1)
        fetch(codes + tl.minimum(feature, FEATURES - 1).to(tl.int64)[:, None] * WIDTH + line[None, :])
        wait()
    row = tl.arange(0, M)
    here = row < rows
    acc, up, square = _sum_columns(
        total, x, added, norm, codes, scale, zero, first, tile, feature, there, row, here, COLUMNS, FEATURES, WIDTH,
        STEPS, KIND, GROUP, ZERO, NORM, ADD, GATE, NARROW, PACKED, CONVERTS, M, N, STEP, SIZE,
    )  # fmt: skip
    last = True
    if PIECES > 1:
        last = _leave(sums, squares, arrived, acc, up, square, tile, piece, row, here, rows, PIECES, NORM, GATE, N)
    if last:
        if PIECES > 1:
            acc, up, square = _add_pieces(sums, squares, tile, row, here, rows, PIECES, NORM, GATE, M, N)
            tl.store(arrived + tile, 0)
        shift = 1.0 / _SHIFTED if CONVERTS else 1.0
        acc = acc * (tl.load(factor + feature, mask=there, other=0.0) * shift)[None, :]
        if GATE:
            up = up * (tl.load(factor + FEATURES + feature, mask=there, other=0.0) * shift)[None, :]
        kept = here[:, None] & there[None, :]
        _finish(out, acc, up, square, bias, residual, row, feature, kept, there, eps, COLUMNS, FEATURES, NORM, GATE,
                BIAS, RESIDUAL)  # fmt: skip


@triton.jit
def _sum_columns(
    total, x, added, norm, codes, scale, zero, first, tile, feature, there, row, here,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    NARROW: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STEP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns (products, those of the second half of the features, squares of the rows) of a piece of the columns."""
    ALL: tl.constexpr = 2 * FEATURES if GATE else FEATURES
    code_row = codes + feature.to(tl.int64) * WIDTH
    acc = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    square = tl.zeros([M], tl.float32)
    for i in range(first, tl.minimum(first + STEPS, (COLUMNS + STEP - 1) // STEP)):
        low, high = _load_codes(code_row, i, there, x.dtype.element_ty, KIND, WIDTH, SIZE, PACKED)
        up_low, up_high = low, high
        if GATE:
            up_row = code_row + FEATURES * WIDTH
            up_low, up_high = _load_codes(up_row, i, there, x.dtype.element_ty, KIND, WIDTH, SIZE, PACKED)
        for half in tl.static_range(STEP // SIZE):
            begin = i * STEP + half * SIZE
            at = begin + tl.arange(0, SIZE)
            inside = at < COLUMNS
            value = tl.load(x + row[:, None] * COLUMNS + at[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            if ADD:
                value = _add_residual(value, added, total, row, at, here, inside, tile, COLUMNS)
            weight = 0.0
            if NORM:
                wide = value.to(tl.float32)
                square += tl.sum(wide * wide, 1)
                weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
                if not NARROW:
                    value = (wide * weight[None, :]).to(value.dtype)
            own = low if half == 0 else high
            acc = _coded_step(acc, value, own, weight, scale, zero, begin, feature, there, COLUMNS, ALL, KIND, GROUP,
                              ZERO, CONVERTS, NORM and NARROW)  # fmt: skip
            if GATE:
                other = up_low if half == 0 else up_high
                up = _coded_step(up, value, other, weight, scale, zero, begin, feature + FEATURES, there, COLUMNS, ALL,
                                 KIND, GROUP, ZERO, CONVERTS, NORM and NARROW)  # fmt: skip
    return acc, up, square


@triton.jit
def _leave(
    sums, squares, arrived, acc, up, square, tile, piece, row, here, rows,
    PIECES: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Stores a piece's sums; returns True to the program that arrives last."""
    mine = sums + (tile * PIECES + piece) * rows * N + row[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(mine, acc, mask=here[:, None])
    if GATE:
        tl.store(mine + tl.num_programs(0) * PIECES * rows * N, up, mask=here[:, None])
    if NORM:
        tl.store(squares + (tile * PIECES + piece) * rows + row, square, mask=here)
    tl.debug_barrier()  # all threads have stored their part before one counts the program
    return tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PIECES - 1


@triton.jit
def _add_pieces(
    sums, squares, tile, row, here, rows, PIECES: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns the sums of all pieces, added in the order of the columns."""
    acc = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    square = tl.zeros([M], tl.float32)
    for i in range(0, PIECES):
        other = sums + (tile * PIECES + i) * rows * N + row[:, None] * N + tl.arange(0, N)[None, :]
        acc += tl.load(other, mask=here[:, None], other=0.0, cache_modifier=".cg")
        if GATE:
            beyond = tl.num_programs(0) * PIECES * rows * N
            up += tl.load(other + beyond, mask=here[:, None], other=0.0, cache_modifier=".cg")
        if NORM:
            left = squares + (tile * PIECES + i) * rows + row
            square += tl.load(left, mask=here, other=0.0, cache_modifier=".cg")
    return acc, up, square


@triton.jit
def _load_codes(
    code_row, i, there, dtype: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Returns the codes [SIZE, N] of step ``i``, and of its second half where two share a byte."""
    at = i * SIZE + tl.arange(0, SIZE)
    held = tl.load(code_row[None, :] + at[:, None], mask=there[None, :] & (at < WIDTH)[:, None], other=0)
    if KIND == _INT4:
        low, high = split_codes(held, dtype, PACKED)
    else:
        low = held
        high = held
    return low, high


@triton.jit
def _coded_step(
    acc, value, held, weight, scale, zero, begin, feature, there, COLUMNS: tl.constexpr, ALL: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, CONVERTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Returns ``acc`` plus the product of columns from ``begin`` on, whose codes are ``held`` [SIZE, N]."""
    group = feature
    if GROUP:  # the second half of the last step may lie beyond the last group
        group = (tl.minimum(begin, COLUMNS - 1) // GROUP).to(tl.int64) * ALL + feature
    numbers = decode_numbers(held, zero + group, there, KIND, ZERO, CONVERTS)
    if SCALED:
        numbers = numbers.to(tl.float32) * weight[:, None]
    numbers = numbers.to(value.dtype)
    if GROUP:
        size = tl.load(scale + group, mask=there, other=0.0).to(tl.float32)
        acc += tl.dot(value, numbers, input_precision="ieee") * size[None, :]
    else:
        acc = tl.dot(value, numbers, acc, input_precision="ieee")
    return acc
