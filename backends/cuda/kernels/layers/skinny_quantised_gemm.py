"""Products of few rows with quantised weights, fused with the operations around them as ``skinny_gemm`` fuses dense
ones: norm and its sum, bias, SiLU product, residual.

Codes are read once, as they are stored, and decoded on the way into the tensor cores as their first operand: from
shared memory to the registers in which a warp multiplies them, a word of four bytes at a time, so that rows of
activations, the second operand, need no moves. Columns are cut, and pieces added, as in ``skinny_gemm``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import quantised_linear, tile_sizes
from trencadis.backends.cuda.kernels.code_decoding import (
    PLACED,
    decode_codes,
    find_conversion,
    is_packed,
    place_floats,
    places_floats,
)
from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.kernels.layers import dependent_launch, skinny_gemm
from trencadis.backends.cuda.kernels.layers.dependent_launch import fetch, wait
from trencadis.backends.cuda.kernels.layers.skinny_gemm import LINES, NormOf, _add_residual, _finish
from trencadis.backends.cuda.weights.quantised_weight import INT4, SHIFTED, QuantisedWeight

_INT4, _SHIFTED = tl.constexpr(INT4), tl.constexpr(SHIFTED)

ENLARGED = tl.constexpr(2.0**64)
"""Factor of rows that meet codes which are ``PLACED`` times too small, so that no sum is subnormal; the rest of PLACED
is part of the weight's factor. Rows from 2^-60 to 2^63 lose nothing by it."""

_MADE_UP = tl.constexpr(PLACED / 2.0**64 / SHIFTED)
STEP = 128
"""Columns of a trip of the loop, which may be several steps."""

PROGRAMS, LEAST_STEPS = 528, 2
"""Maximum programs of a product, and fewest trips of one: four programs of two warps for each processor of an H100."""

LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""

FEW = 8
"""Maximum rows of a launch whose tile has no more: half the work of 16 for each code, and loops of fewer registers."""


def fits(w: QuantisedWeight) -> bool:
    """True if ``product`` takes the weight: its columns are in order, and its rows begin on 16 bytes."""
    plain = w.gather is None and w.columns == w.in_features
    return plain and w.codes.shape[1] % 16 == 0 and w.out_features <= 16 * skinny_gemm.COUNTERS


def step_of(w: QuantisedWeight) -> int:
    """Returns the columns of a step, which are of one group or, of 4 bits, of one or two."""
    return STEP if w.kind != INT4 and w.group % STEP == 0 else quantised_linear.span(w)


def tile_of(x: Tensor, w: QuantisedWeight, gate: bool) -> tile_sizes.Tile:
    """Returns the tile; m: rows, n: features. The table's ``head`` is the bits of a code, its ``group`` 1 for two
    products, its ``length`` "few" up to ``FEW`` rows, with more "narrow" for float16, whose weights are multiplied by
    the norm's.
    """
    found, bits = tile_sizes.FORCED.get("coded_skinny"), 4 if w.kind == INT4 else 8
    few = len(x) <= FEW and in_use().runs_ptx  # NVIDIA's products have 8 rows at the least, others' perhaps 16
    length = "few" if few else "narrow" if x.dtype == torch.float16 else "wide"
    arch = tile_sizes.arch_of(x.device)
    return found or tile_sizes.find("coded_skinny", arch, x.itemsize * 8, bits, int(gate), length)


def pieces(features: int, steps: int, n: int) -> int:
    """Returns into how many pieces the columns are cut, at most."""
    return max(min(-(-PROGRAMS // -(-features // n)), steps // LEAST_STEPS), 1)


def product(
    x: Tensor, w: QuantisedWeight, arrived: Tensor, norm: NormOf | None = None, gate: bool = False,
    residual: Tensor | None = None, scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies as ``skinny_gemm.product`` does, by codes.

    Args:
        scales: float32 [n], of tokens that ``activation_rounding.round_few`` rounded, which have no norm here; None: of
            none.
        dtype: of the result; None: ``x``'s.
    """
    assert (scales is not None) == w.rounds and (scales is None or norm is None), "rounded after the norm"
    n, features = x.shape[0], w.out_features // (2 if gate else 1)
    assert fits(w) and x.ndim == 2 and 0 < n <= skinny_gemm.FEW and x.shape[1] == w.in_features and x.is_contiguous()
    step, tile = step_of(w), tile_of(x, w, gate)
    spans = max(STEP // step, 1)
    _, cut, each, count, out, sums, squares, added, total = skinny_gemm.make_parts(
        x, features, w.columns, spans * step, arrived, norm, gate, tile,
        pieces(features, -(-w.columns // (spans * step)), tile.n), dtype,
    )  # fmt: skip
    depends = dependent_launch.possible(x.device)
    coded_skinny_kernel[(count, cut)](
        out, total, sums, squares, arrived, x, added, x if norm is None else norm.weight, w.codes, w.factor,
        w.factor if w.scale is None else w.scale, w.factor if w.zero is None else w.zero,
        out if w.bias is None else w.bias, x if residual is None else residual,
        w.factor if scales is None else scales, n, 0.0 if norm is None else norm.eps,
        COLUMNS=w.columns, FEATURES=features, WIDTH=w.codes.shape[1], PIECES=cut, STEPS=each, KIND=w.kind,
        GROUP=w.group, ZERO=w.zero is not None, NORM=norm is not None,
        ADD=norm is not None and norm.residual is not None, GATE=gate, BIAS=w.bias is not None,
        RESIDUAL=residual is not None, ROUNDED=scales is not None, NARROW=x.dtype == torch.float16,
        PACKED=is_packed(x.dtype), CONVERTS=find_conversion(w, x.device), PLACES=places_floats(w, x.dtype, x.device),
        DEPENDENT=depends, M=tile.m, N=tile.n, STEP=step, SPANS=spans,
        num_warps=tile.warps, num_stages=tile.stages, **dependent_launch.options(depends),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "eps"])
def coded_skinny_kernel(
    out, total, sums, squares, arrived, x, added, norm, codes, factor, scale, zero, bias, residual, token_scale, rows,
    eps, COLUMNS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROUNDED: tl.constexpr, NARROW: tl.constexpr,
    PACKED: tl.constexpr, CONVERTS: tl.constexpr, PLACES: tl.constexpr, DEPENDENT: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STEP: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = STEP // 2 if KIND == _INT4 else STEP
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    feature = tile * N + tl.arange(0, N)
    there = feature < FEATURES
    first = piece * STEPS
    if DEPENDENT:
        line = tl.minimum(first * SPANS * SIZE + tl.arange(0, LINES) * LINE, WIDTH - 1)
        fetch(codes + tl.minimum(feature, FEATURES - 1).to(tl.int64)[:, None] * WIDTH + line[None, :])
        wait()
    row = tl.arange(0, M)
    here = row < rows
    acc, up, square = _sum_columns(
        total, x, added, norm, codes, scale, zero, first, tile, feature, there, row, here, COLUMNS, FEATURES, WIDTH,
        STEPS, KIND, GROUP, ZERO, NORM, ADD, GATE, NARROW, PACKED, CONVERTS, PLACES, M, N,
        STEP, SPANS, SIZE,
    )  # fmt: skip
    last = True
    if PIECES > 1:
        last = _leave(sums, squares, arrived, acc, up, square, tile, piece, row, here, rows, PIECES, NORM, GATE, N)
    if last:
        if PIECES > 1:
            acc, up, square = _add_pieces(sums, squares, tile, row, here, rows, PIECES, NORM, GATE, M, N)
            tl.store(arrived + tile, 0)
        shift = _MADE_UP if PLACES else 1.0 / _SHIFTED if CONVERTS else 1.0
        acc = acc * (tl.load(factor + feature, mask=there, other=0.0) * shift)[None, :]
        if GATE:
            up = up * (tl.load(factor + FEATURES + feature, mask=there, other=0.0) * shift)[None, :]
        if ROUNDED:
            size = tl.load(token_scale + row, mask=here, other=0.0)[:, None]
            acc = acc * size
            up = up * size
        kept = here[:, None] & there[None, :]
        _finish(out, acc, up, square, bias, residual, row, feature, kept, there, eps, COLUMNS, FEATURES, NORM, GATE,
                BIAS, RESIDUAL)  # fmt: skip


@triton.jit
def _sum_columns(
    total, x, added, norm, codes, scale, zero, first, tile, feature, there, row, here,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    NARROW: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr, PLACES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STEP: tl.constexpr, SPANS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns (products, those of the second half of the features, squares of the rows) of a piece of the columns.

    Scales and zero points of a step are loaded one step before, since nothing else would hide how long that takes.
    """
    ALL: tl.constexpr = 2 * FEATURES if GATE else FEATURES
    offset = feature[:, None] * WIDTH + tl.arange(0, SIZE)[None, :]
    acc = tl.zeros([N, M], tl.float32)
    up = tl.zeros([N, M], tl.float32)
    square = tl.zeros([M], tl.float32)
    groups = _load_groups(
        scale, zero, first * SPANS * STEP, feature, there, COLUMNS, ALL, GROUP, ZERO, GATE, STEP, SIZE
    )
    for i in range(first * SPANS, tl.minimum(first + STEPS, tl.cdiv(COLUMNS, STEP * SPANS)) * SPANS, SPANS):
        for part in tl.static_range(SPANS):
            step = i + part
            held = _load_codes(codes, step, offset, there, FEATURES, WIDTH, N, SIZE, SPANS)
            other = held
            if GATE:
                other = _load_codes(codes + FEATURES * WIDTH, step, offset, there, FEATURES, WIDTH, N, SIZE, SPANS)
            later = _load_groups(
                scale, zero, (step + 1) * STEP, feature, there, COLUMNS, ALL, GROUP, ZERO, GATE, STEP, SIZE
            )
            for half in tl.static_range(STEP // SIZE):
                at = step * STEP + half * SIZE + tl.arange(0, SIZE)
                inside = at < COLUMNS
                seen = here[:, None] & inside[None, :]
                value = tl.load(x + row[:, None] * COLUMNS + at[None, :], mask=seen, other=0.0)
                if ADD:
                    value = _add_residual(value, added, total, row, at, here, inside, tile, COLUMNS)
                weight = 0.0
                if NORM:
                    wide = value.to(tl.float32)
                    square += tl.sum(wide * wide, 1)
                    weight = tl.load(norm + at, mask=inside, other=0.0)
                    if PLACES:
                        weight = weight * tl.full([1], ENLARGED, weight.dtype)
                    if not NARROW:
                        value = (wide * weight.to(tl.float32)[None, :]).to(value.dtype)
                elif PLACES:
                    value = value * tl.full([1, 1], ENLARGED, value.dtype)
                acc = _coded_step(acc, value, held, half, weight, groups[half][0], groups[half][1], KIND, GROUP, ZERO,
                                  PACKED, CONVERTS, PLACES, NORM and NARROW)  # fmt: skip
                if GATE:
                    up = _coded_step(up, value, other, half, weight, groups[half][2], groups[half][3], KIND, GROUP,
                                     ZERO, PACKED, CONVERTS, PLACES, NORM and NARROW)  # fmt: skip
            groups = later
    return tl.trans(acc), tl.trans(up), square


@triton.jit
def _load_groups(
    scale, zero, begin, feature, there, COLUMNS: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, GATE: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns (scales, zero points, those of the second half of the features) of each half of a step."""
    low = _load_group(scale, zero, begin, feature, there, COLUMNS, ALL, GROUP, ZERO, GATE)
    high = low
    if STEP > SIZE and GROUP > 0 and GROUP % STEP != 0:
        high = _load_group(scale, zero, begin + SIZE, feature, there, COLUMNS, ALL, GROUP, ZERO, GATE)
    return low, high


@triton.jit
def _load_group(
    scale, zero, begin, feature, there, COLUMNS: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    at = feature
    if GROUP:  # a step may lie beyond the last group
        at = (tl.minimum(begin, COLUMNS - 1) // GROUP).to(tl.int64) * ALL + feature
    size = 0.0
    less = 0
    up_size = 0.0
    up_less = 0
    if GROUP:
        size = tl.load(scale + at, mask=there, other=0.0)
        up_size = size
        if GATE:
            up_size = tl.load(scale + at + ALL // 2, mask=there, other=0.0)
    if ZERO:
        less = tl.load(zero + at, mask=there, other=0)
        up_less = less
        if GATE:
            up_less = tl.load(zero + at + ALL // 2, mask=there, other=0)
    return size, less, up_size, up_less


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
    codes, step, offset, there, FEATURES: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """Returns the codes [N, SIZE] of a step; masks only where a shape needs them, since they narrow the loads."""
    address = codes + step * SIZE + offset
    if FEATURES % N == 0 and WIDTH % (SIZE * SPANS) == 0:
        held = tl.load(address)
    else:
        inside = step * SIZE + tl.arange(0, SIZE) < WIDTH
        held = tl.load(address, mask=there[:, None] & inside[None, :], other=0)
    return held


@triton.jit
def _coded_step(
    acc, value, held, half: tl.constexpr, weight, size, less, KIND: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr, PLACES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Returns ``acc`` [N, M] plus the product of codes ``held`` [N, SIZE], of 4 bits the ``half`` of each byte, with
    ``value`` [M, SIZE].
    """
    zero = less[:, None] if ZERO else less
    if PLACES:
        numbers = place_floats(held, PACKED)
    else:
        numbers = decode_codes(held, half, zero, value.dtype, KIND, ZERO, PACKED, CONVERTS)
    if SCALED:
        numbers = numbers.to(weight.dtype) * weight[None, :]
    numbers = numbers.to(value.dtype)
    if GROUP:
        acc += tl.dot(numbers, tl.trans(value), input_precision="ieee") * size.to(tl.float32)[:, None]
    else:
        acc = tl.dot(numbers, tl.trans(value), acc, input_precision="ieee")
    return acc
