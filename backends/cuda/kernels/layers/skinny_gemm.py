"""Products of few rows, fused with the operations around them: RMS norm and its sum, bias, SiLU product, residual.

Weights are read once, at the speed of memory; a program computes some features over a piece of the columns. How columns
are cut follows from the weight's shape alone. Pieces store their sums; the last program to finish adds them in the
order of the columns, so that bits do not depend on which one that is.

The norm's factor of a row is applied to its sums: the squares are added up along with the product, so no program reads
a row twice. The norm's weight multiplies the row in bfloat16 and float32, whose range is large enough, and the
product's weights in float16, whose largest value a stream may come near.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cpu.reference_ops import PlainWeight
from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.layers import dependent_launch
from trencadis.backends.cuda.kernels.layers.dependent_launch import fetch, wait

FEW = 16
"""Maximum number of rows."""

PROGRAMS, LEAST_STEPS = 264, 4
"""Maximum programs of a product, and fewest steps of one: two programs for each processor of an H100."""

COUNTERS = 8192
"""Maximum number of tiles of features of a product."""

LINES = tl.constexpr(8)
"""Lines of the L2 cache (128 bytes) of each feature that a program prefetches before it waits."""


class NormOf(NamedTuple):
    """The norm before a product: of x, or of x + residual, which is then stored in ``total``."""

    weight: Tensor  # [in], of x's dtype or float32
    eps: float
    residual: Tensor | None = None
    total: Tensor | None = None


def counters(device: torch.device) -> Tensor:
    """Returns int32 zeros, one for each tile of features; every launch leaves them as zeros."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def step_of(x: Tensor) -> int:
    """Returns the columns of a step: 256 bytes."""
    return 256 // x.itemsize


def tile_of(x: Tensor, gate: bool) -> tile_sizes.Tile:
    """Returns the tile; m: rows, n: features. The table's ``head`` is the columns of a step, its ``group`` 1 for two
    products.
    """
    found = tile_sizes.FORCED.get("skinny")
    return found or tile_sizes.find(
        "skinny", tile_sizes.arch_of(x.device), x.itemsize * 8, step_of(x), int(gate), "any"
    )


def pieces(features: int, steps: int, n: int) -> int:
    """Returns into how many pieces the columns are cut, at most."""
    return max(min(-(-PROGRAMS // -(-features // n)), steps // LEAST_STEPS), 1)


class LaunchParts(NamedTuple):
    """How one launch is cut, and its tensors besides weights.

    Args:
        cut, steps: pieces of the columns, and the steps of each.
        feature_tiles: tiles of features.
        sums, squares: float32 results of pieces; ``out`` where there is one piece.
        added, total: the norm's residual and its sum; ``x`` where there is none.
    """

    tile: tile_sizes.Tile
    cut: int
    steps: int
    feature_tiles: int
    out: Tensor
    sums: Tensor
    squares: Tensor
    added: Tensor
    total: Tensor


def make_parts(
    x: Tensor, features: int, columns: int, step: int, arrived: Tensor, norm: NormOf | None, gate: bool,
    tile: tile_sizes.Tile, most: int, dtype: torch.dtype | None = None,
) -> LaunchParts:  # fmt: skip
    """Makes the parts of a launch that multiplies x [n, in] by ``columns`` columns, ``step`` at a time, in at most
    ``most`` pieces; the result has ``dtype``, or x's.
    """
    n = x.shape[0]
    out = x.new_empty(n, features, dtype=dtype)
    count, steps = -(-features // tile.n), -(-columns // step)
    each = -(-steps // most)
    cut = -(-steps // each)
    assert count <= len(arrived), (count, len(arrived))
    sums, squares = out, out
    if cut > 1:
        sums = torch.empty(((1 + gate) * count * cut, n, tile.n), dtype=torch.float32, device=x.device)
        squares = torch.empty((count * cut, n), dtype=torch.float32, device=x.device) if norm is not None else sums
    added = norm.residual if norm is not None and norm.residual is not None else x
    total = norm.total if norm is not None and norm.total is not None else x
    return LaunchParts(tile, cut, each, count, out, sums, squares, added, total)


def product(
    x: Tensor, w: PlainWeight, arrived: Tensor, norm: NormOf | None = None, gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies [n, in] -> [n, out], n at most FEW; with ``gate`` [n, out / 2]: silu of the first half times the
    second.

    Args:
        arrived: from ``counters``.
        residual: [n, out], added last, before the one rounding.
    """
    n, features, step = x.shape[0], w.out_features // (2 if gate else 1), step_of(x)
    check(x, w, norm, residual)
    tile = tile_of(x, gate)
    _, cut, each, count, out, sums, squares, added, total = make_parts(
        x, features, w.in_features, step, arrived, norm, gate, tile, pieces(features, -(-w.in_features // step), tile.n)
    )
    depends = dependent_launch.possible(x.device)
    options: dict[str, Any] = dependent_launch.options(depends)
    skinny_kernel[(count, cut)](
        out, total, sums, squares, arrived, x, added, x if norm is None else norm.weight, w.weight,
        out if w.bias is None else w.bias, x if residual is None else residual, n, 0.0 if norm is None else norm.eps,
        COLUMNS=w.in_features, FEATURES=features, PIECES=cut, STEPS=each, NORM=norm is not None,
        ADD=norm is not None and norm.residual is not None, GATE=gate, BIAS=w.bias is not None,
        RESIDUAL=residual is not None, NARROW=x.dtype == torch.float16, DEPENDENT=depends, M=tile.m, N=tile.n,
        STEP=step, num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    return out


def check(x: Tensor, w: PlainWeight, norm: NormOf | None, residual: Tensor | None) -> None:
    """Asserts: x [n, in], norm and residual are contiguous and of the weight's dtype."""
    assert x.ndim == 2 and 0 < x.shape[0] <= FEW and x.shape[1] == w.in_features, (x.shape, w.in_features)
    assert x.is_contiguous() and w.weight.is_contiguous() and w.weight.dtype == x.dtype
    if norm is not None:
        assert norm.weight.shape == x.shape[1:] and (norm.residual is None) == (norm.total is None)
        assert norm.residual is None or (norm.residual.shape == x.shape and norm.residual.is_contiguous())
    assert residual is None or (residual.shape == (x.shape[0], w.out_features) and residual.is_contiguous())


@triton.jit(do_not_specialize=["rows", "eps"])
def skinny_kernel(
    out, total, sums, squares, arrived, x, added, norm, weight, bias, residual, rows, eps,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NARROW: tl.constexpr,
    DEPENDENT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    feature = tile * N + tl.arange(0, N)
    first = piece * STEPS
    last = tl.minimum(first + STEPS, (COLUMNS + STEP - 1) // STEP)
    if DEPENDENT:
        EACH: tl.constexpr = STEP // 2  # values of a line: a step has two lines
        line = first * STEP + tl.arange(0, LINES) * EACH
        row_of = tl.minimum(feature, FEATURES - 1).to(tl.int64)[:, None] * COLUMNS
        fetch(weight + row_of + tl.minimum(line, COLUMNS - 1)[None, :])
        wait()
    row = tl.arange(0, M)
    here = row < rows
    there = feature < FEATURES
    acc = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    square = tl.zeros([M], tl.float32)
    for i in range(first, last):
        at = i * STEP + tl.arange(0, STEP)
        inside = at < COLUMNS
        value = tl.load(x + row[:, None] * COLUMNS + at[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        if ADD:
            value = _add_residual(value, added, total, row, at, here, inside, tile, COLUMNS)
        factor = 0.0
        if NORM:
            wide = value.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            factor = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            if not NARROW:
                value = (wide * factor).to(value.dtype)
        acc = _step(acc, value, weight, feature, at, there, inside, factor, COLUMNS, FEATURES, N, STEP, NORM and NARROW)
        if GATE:
            up = _step(
                up, value, weight + FEATURES * COLUMNS, feature, at, there, inside, factor, COLUMNS, FEATURES, N, STEP,
                NORM and NARROW,
            )  # fmt: skip
    kept = here[:, None] & there[None, :]
    if PIECES == 1:
        _finish(out, acc, up, square, bias, residual, row, feature, kept, there, eps, COLUMNS, FEATURES, NORM, GATE,
                BIAS, RESIDUAL)  # fmt: skip
    else:
        spot = row[:, None] * N + tl.arange(0, N)[None, :]
        mine = sums + (tile * PIECES + piece) * rows * N + spot
        beyond = tl.num_programs(0) * PIECES * rows * N
        tl.store(mine, acc, mask=here[:, None])
        if GATE:
            tl.store(mine + beyond, up, mask=here[:, None])
        if NORM:
            tl.store(squares + (tile * PIECES + piece) * rows + row, square, mask=here)
        tl.debug_barrier()  # all threads have stored their part before one counts the program
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PIECES - 1:
            acc = tl.zeros([M, N], tl.float32)
            up = tl.zeros([M, N], tl.float32)
            square = tl.zeros([M], tl.float32)
            for i in range(0, PIECES):
                other = sums + (tile * PIECES + i) * rows * N + spot
                acc += tl.load(other, mask=here[:, None], other=0.0, cache_modifier=".cg")
                if GATE:
                    up += tl.load(other + beyond, mask=here[:, None], other=0.0, cache_modifier=".cg")
                if NORM:
                    left = squares + (tile * PIECES + i) * rows + row
                    square += tl.load(left, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _finish(out, acc, up, square, bias, residual, row, feature, kept, there, eps, COLUMNS, FEATURES, NORM, GATE,
                    BIAS, RESIDUAL)  # fmt: skip


@triton.jit
def _add_residual(value, added, total, row, at, here, inside, tile, COLUMNS: tl.constexpr):
    """Returns x + residual, rounded as the stream is; the programs of the first features store it in ``total``."""
    address = row[:, None] * COLUMNS + at[None, :]
    kept = here[:, None] & inside[None, :]
    more = tl.load(added + address, mask=kept, other=0.0)
    value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
    if tile == 0:
        tl.store(total + address, value, mask=kept)
    return value


@triton.jit
def _step(
    acc, value, weight, feature, at, there, inside, factor, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
    N: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Returns ``acc`` plus the product of one step; masks only where a shape needs them, since they narrow the
    loads.
    """
    address = weight + feature.to(tl.int64)[:, None] * COLUMNS + at[None, :]
    if FEATURES % N == 0 and COLUMNS % STEP == 0:
        held = tl.load(address)
    else:
        held = tl.load(address, mask=there[:, None] & inside[None, :], other=0.0)
    if SCALED:
        held = (held.to(tl.float32) * factor).to(held.dtype)
    return tl.dot(value, tl.trans(held), acc, input_precision="ieee")


@triton.jit
def _finish(
    out, acc, up, square, bias, residual, row, feature, kept, there, eps, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Applies bias, norm factor, gate and residual after the product, in float32 with one rounding."""
    if NORM:
        scale = tl.rsqrt(square / COLUMNS + eps)[:, None]
        acc = acc * scale
        if GATE:
            up = up * scale
    if BIAS:
        acc += tl.load(bias + feature, mask=there, other=0.0).to(tl.float32)[None, :]
        if GATE:
            up += tl.load(bias + FEATURES + feature, mask=there, other=0.0).to(tl.float32)[None, :]
    if GATE:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    address = row[:, None] * FEATURES + feature[None, :]
    if RESIDUAL:
        acc += tl.load(residual + address, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + address, acc.to(out.dtype.element_ty), mask=kept)
