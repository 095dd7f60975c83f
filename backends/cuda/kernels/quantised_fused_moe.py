"""Grouped products of experts by codes: each program decodes some features of its tile's expert as it multiplies.

As in ``fused_moe``, a tile has pairs of one expert, and what a token gets follows from its own row. Codes are the first
operand (``code_decoding``), and each group's sum is multiplied by its scale; in tiles of prompts, whose sums fill the
registers, each code is instead, and its value rounded once. Rows of 8-bit activations are rounded before a product, one
scale a row; integers are multiplied as integers, floats in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import quantised_linear, tile_sizes
from trencadis.backends.cuda.kernels.activation import adjust_up, apply_activation
from trencadis.backends.cuda.kernels.activation_rounding import round_rows
from trencadis.backends.cuda.kernels.code_decoding import NO_CONVERSION, decode_codes, find_conversion, is_packed
from trencadis.backends.cuda.weights.quantised_weight import E4M3, FOUR_BITS, FP4, INT8, SHIFTED
from trencadis.backends.cuda.weights.stacked_experts import StackedCodes
from trencadis.core.quant.quantised_weight_layout_and_bytes import half_of

_INT8, _FP4, _SHIFTED = tl.constexpr(INT8), tl.constexpr(FP4), tl.constexpr(SHIFTED)

BLOCK = 1024
"""Columns of a program that gathers rows."""

GROUPED = 8
"""Tiles of pairs whose programs follow each other."""

FOLDED_PAIRS = 128
"""Pairs of a tile from which scales of groups multiply codes, since sums of a group would fill the registers."""

_GROUPED, _FOLDED_PAIRS = tl.constexpr(GROUPED), tl.constexpr(FOLDED_PAIRS)


class PairTiles(NamedTuple):
    """Which pairs a launch multiplies, as ``fused_moe.Routes`` has them, and how many of them read one row."""

    order: Tensor  # int32 [tiles x M]
    owner: Tensor  # int32 [tiles]
    top: int


def tile_of(x: Tensor, w: StackedCodes, length: str, gated: bool) -> tile_sizes.Tile:
    """Returns the tile; m: pairs, n: features, of gates and of ups alike if ``gated``. The table's ``head`` is the bits
    of a code, its ``group`` 1 for gates and ups.
    """
    bits = 4 if w.kind in FOUR_BITS else 8
    found, arch = tile_sizes.FORCED.get("coded_experts"), tile_sizes.arch_of(x.device)
    return found or tile_sizes.find("coded_experts", arch, x.dtype.itemsize * 8, bits, int(gated), length)


def check(w: StackedCodes, shape: tuple[int, int, int]) -> None:
    """Asserts that the parts of a matrix [count, out, in] fit each other."""
    assert w.shape == shape and w.codes.is_contiguous() and w.factor.shape == shape[:2], (w.shape, shape)
    assert w.codes.dtype == (torch.int8 if w.kind == INT8 else torch.uint8)
    for part in (w.scale, w.zero):
        assert part is None or (part.is_contiguous() and part.shape[::2] == shape[:2])


def multiply_up(
    x: Tensor, w: StackedCodes, bias: Tensor | None, pairs: PairTiles, inner: int, act: int, tile: tile_sizes.Tile
) -> Tensor:
    """Returns the activations [pairs, inner] of gates and ups of x [n, hidden]; ``act``: of ``activation.KINDS``."""
    out = x.new_empty((len(x) * pairs.top, inner))
    rows = _read_rows(x, w, pairs)
    coded_experts_kernel[(len(pairs.owner) * -(-inner // tile.n),)](
        out, *_arguments(rows, w, bias, pairs), inner, TOP=rows.pairs, ACT=act, GATED=w.shape[1] == 2 * inner,
        **_constants(x, w, rows, bias, tile),
    )  # fmt: skip
    return out


def multiply_down(
    x: Tensor, w: StackedCodes, bias: Tensor | None, pairs: PairTiles, shares: Tensor, tile: tile_sizes.Tile
) -> Tensor:
    """Returns each pair's product [pairs, hidden] of x [pairs, inner], times its share."""
    hidden = w.shape[1]
    out = x.new_empty((len(x), hidden))
    rows = _read_rows(x, w, pairs)
    coded_experts_down_kernel[(len(pairs.owner) * -(-hidden // tile.n),)](
        out, shares, *_arguments(rows, w, bias, pairs), hidden, **_constants(x, w, rows, bias, tile)
    )
    return out


class ReadRows(NamedTuple):
    """The rows of a product, in the order of its columns; float32 scales [rows] if they are rounded; how many pairs
    read each.
    """

    values: Tensor
    scale: Tensor | None
    pairs: int


def _read_rows(x: Tensor, w: StackedCodes, pairs: PairTiles) -> ReadRows:
    """Gathers and rounds the rows of a product.

    An expert whose columns have an order of their own gets rows in that order, one for each pair.
    """
    each = pairs.top
    if w.gather is not None:
        given = x.new_empty((len(x) * each, w.columns))
        m = len(pairs.order) // len(pairs.owner)
        gather_pairs_kernel[(len(pairs.order), -(-w.columns // BLOCK))](
            given, x, w.gather, pairs.order, pairs.owner, x.shape[1], w.columns, each, M=m, BLOCK=BLOCK, num_warps=4
        )  # fmt: skip
        x, each = given, 1
    if not w.rounds:
        return ReadRows(x, None, each)
    codes, scale = round_rows(x, torch.int8 if w.kind == INT8 else x.dtype)
    return ReadRows(codes, scale, each)


def _arguments(rows: ReadRows, w: StackedCodes, bias: Tensor | None, pairs: PairTiles) -> tuple[object, ...]:
    """Returns the arguments that both kernels take."""
    return (
        rows.values, w.factor if rows.scale is None else rows.scale, w.codes, w.factor,
        w.factor if w.scale is None else w.scale, w.factor if w.zero is None else w.zero,
        w.factor if bias is None else bias, pairs.order, pairs.owner, w.columns, w.codes.shape[2],
    )  # fmt: skip


def _constants(
    x: Tensor, w: StackedCodes, rows: ReadRows, bias: Tensor | None, tile: tile_sizes.Tile
) -> dict[str, int]:
    span = span_of(w)
    groups = w.columns if not w.group else w.group
    return {
        "KIND": w.kind, "GROUP": w.group, "GROUPS": -(-w.columns // groups), "SPAN": span,
        "HALVES": 2 if w.kind in FOUR_BITS else 1, "ZERO": w.zero is not None,
        "ROUNDED": rows.scale is not None, "BIASED": bias is not None, "WHOLE": w.columns % span == 0,
        "PACKED": is_packed(x.dtype), "CONVERTS": conversion_of(w, x.device), "M": tile.m, "N": tile.n,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def span_of(w: StackedCodes) -> int:
    """Returns the columns of a step: of one group or, of 4 bits, of one or two."""
    return 2 * half_of(w.group) if w.kind in FOUR_BITS else quantised_linear.span(w.matrix(0))


def conversion_of(w: StackedCodes, device: torch.device) -> int:
    """Returns what the card itself converts the codes to, as ``code_decoding.find_conversion`` does."""
    return find_conversion(w.matrix(0), device) if w.kind == E4M3 else NO_CONVERSION


@triton.jit
def order_programs(blocks):
    """Returns (tile, block of features) of this program of tiles x ``blocks``.

    ``GROUPED`` tiles take all blocks before the next ones do: programs that run at a time then read the weight of few
    experts and the rows of few tiles, so that the L2 cache has most of what they load.
    """
    program = tl.program_id(0)
    tiles = tl.num_programs(0) // blocks
    first = program // (_GROUPED * blocks) * _GROUPED
    size = tl.minimum(tiles - first, _GROUPED)
    place = program % (_GROUPED * blocks)
    return first + place % size, place // size


@triton.jit
def tile_places(order, tile, block, M: tl.constexpr, N: tl.constexpr):
    """Returns the pairs of a tile, int64 [M], of which -1 is none, and the features of a block, int64 [N]."""
    pair = tl.load(order + tile * M + tl.arange(0, M)).to(tl.int64)
    return pair, (block * N + tl.arange(0, N)).to(tl.int64)


@triton.jit
def coded_experts_kernel(
    out, x, x_scale, codes, factor, scale, zero, bias, order, owner, columns, width, inner,
    TOP: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr, ZERO: tl.constexpr, ROUNDED: tl.constexpr,
    BIASED: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    tile, block = order_programs(tl.cdiv(inner, N))
    expert = tl.load(owner + tile).to(tl.int64)
    if expert >= 0:
        pair, column = tile_places(order, tile, block, M, N)
        here, there = pair >= 0, column < inner
        features = inner * (2 if GATED else 1)
        token = tl.where(here, pair, 0) // TOP
        gate, up = multiply_codes(
            x + token * columns, codes, scale, zero, expert, columns, width, inner, features, column, here, there,
            GATED, KIND, GROUP, GROUPS, SPAN, HALVES, ZERO, ROUNDED, WHOLE, PACKED, CONVERTS, M, N,
        )  # fmt: skip
        own = expert * features + column
        gate = scale_sums(gate, factor, x_scale, bias, own, token, here, there, ROUNDED, BIASED, CONVERTS)
        made = apply_activation(gate, ACT)
        if GATED:
            up = scale_sums(up, factor, x_scale, bias, own + inner, token, here, there, ROUNDED, BIASED, CONVERTS)
            made *= adjust_up(up, ACT)
        address = out + pair[:, None] * inner + column[None, :]
        tl.store(address, tl.trans(made).to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit
def coded_experts_down_kernel(
    out, shares, x, x_scale, codes, factor, scale, zero, bias, order, owner, columns, width, hidden,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr,
    ZERO: tl.constexpr, ROUNDED: tl.constexpr, BIASED: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
    CONVERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    tile, block = order_programs(tl.cdiv(hidden, N))
    expert = tl.load(owner + tile).to(tl.int64)
    if expert >= 0:
        pair, column = tile_places(order, tile, block, M, N)
        here, there = pair >= 0, column < hidden
        row = tl.where(here, pair, 0)
        made, _ = multiply_codes(
            x + row * columns, codes, scale, zero, expert, columns, width, hidden, hidden, column, here, there,
            False, KIND, GROUP, GROUPS, SPAN, HALVES, ZERO, ROUNDED, WHOLE, PACKED, CONVERTS, M, N,
        )  # fmt: skip
        own = expert * hidden + column
        made = scale_sums(made, factor, x_scale, bias, own, row, here, there, ROUNDED, BIASED, CONVERTS)
        made *= tl.load(shares + pair, mask=here, other=0.0)[None, :]
        address = out + pair[:, None] * hidden + column[None, :]
        tl.store(address, tl.trans(made).to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit
def multiply_codes(
    x_row, codes, scale, zero, expert, columns, width, inner, features, column, here, there,
    GATED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
    HALVES: tl.constexpr, ZERO: tl.constexpr, ROUNDED: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
    CONVERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns sums [N, M] of an expert's features ``column`` and, if GATED, of those ``inner`` after them, with rows at
    ``x_row`` [M]: without factors, int32 if integers are multiplied.
    """
    SIZE: tl.constexpr = SPAN // HALVES
    FOLDED: tl.constexpr = GROUP > 0 and M >= _FOLDED_PAIRS
    SUMMED: tl.constexpr = GROUP > 0 and GROUP % SPAN == 0 and not FOLDED
    SCALED: tl.constexpr = GROUP > 0 and not SUMMED
    acc = tl.zeros([N, M], tl.int32 if ROUNDED and KIND == _INT8 else tl.float32)
    up = tl.zeros([N, M], tl.int32 if ROUNDED and KIND == _INT8 else tl.float32)
    first = codes + (expert * features + column) * width
    scale += expert * features * GROUPS
    zero += expert * features * GROUPS
    for i in range(0, tl.cdiv(columns, SPAN)):
        at = i * SIZE + tl.arange(0, SIZE)
        # Bytes of two codes are padded to whole steps.
        inside = there[:, None] if WHOLE or HALVES == 2 else there[:, None] & (at < columns)[None, :]
        held = tl.load(first[:, None] + at[None, :], mask=inside, other=0)
        other = held
        if GATED:
            other = tl.load((first + inner.to(tl.int64) * width)[:, None] + at[None, :], mask=inside, other=0)
        # A group of whole steps is summed before its scale is multiplied, as other weights are that have one a row.
        part, other_part = acc, up
        if SUMMED:
            part, other_part = tl.zeros([N, M], tl.float32), tl.zeros([N, M], tl.float32)
        for half in tl.static_range(HALVES):
            begin = i * SPAN + half * SIZE
            of = begin + tl.arange(0, SIZE)
            seen = here[:, None] if WHOLE else here[:, None] & (of < columns)[None, :]
            values = tl.load(x_row[:, None] + of[None, :], mask=seen, other=0)
            group = column
            if GROUP:  # the second half of the last step may lie beyond the last group
                group = (tl.minimum(begin, columns - 1) // GROUP) * features + column
            part = add_codes(part, held, values, scale + group, zero + group, there, half, KIND, SCALED, FOLDED,
                             ZERO, ROUNDED, PACKED, CONVERTS)  # fmt: skip
            if GATED:
                other_part = add_codes(other_part, other, values, scale + group + inner, zero + group + inner, there,
                                       half, KIND, SCALED, FOLDED, ZERO, ROUNDED, PACKED, CONVERTS)  # fmt: skip
        if SUMMED:
            at_group = scale + (i * SPAN // GROUP) * features + column
            part = acc + part * tl.load(at_group, mask=there, other=0.0).to(tl.float32)[:, None]
            if GATED:
                other_part = up + other_part * tl.load(at_group + inner, mask=there, other=0.0).to(tl.float32)[:, None]
        acc, up = part, other_part
    return acc, up


@triton.jit
def add_codes(
    acc, held, values, scale, zero, there, half: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    FOLDED: tl.constexpr, ZERO: tl.constexpr, ROUNDED: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Returns ``acc`` [N, M] plus the product of codes ``held`` [N, SIZE], of 4 bits the ``half`` of each byte, with
    ``values`` [M, SIZE]; SCALED: times their scales, FOLDED: which multiply the codes, each value rounded once.
    """
    if ROUNDED and KIND == _INT8:
        acc = tl.dot(held, tl.trans(values), acc, input_precision="ieee", out_dtype=tl.int32)
    else:
        less = tl.load(zero, mask=there, other=0)[:, None] if ZERO else 0
        if KIND == _FP4:
            numbers = decode_fp4(held, half, values.dtype, PACKED)
        else:
            numbers = decode_codes(held, half, less, values.dtype, KIND, ZERO, PACKED, CONVERTS).to(values.dtype)
        if FOLDED:
            size = tl.load(scale, mask=there, other=0.0)[:, None]
            if KIND == _FP4:  # whose scales are powers of two
                numbers *= size.to(values.dtype)
            else:
                numbers = (numbers.to(tl.float32) * size.to(tl.float32)).to(values.dtype)
            acc = tl.dot(numbers, tl.trans(values), acc, input_precision="ieee")
        elif SCALED:
            size = tl.load(scale, mask=there, other=0.0).to(tl.float32)
            acc += tl.dot(numbers, tl.trans(values), input_precision="ieee") * size[:, None]
        else:
            acc = tl.dot(numbers, tl.trans(values), acc, input_precision="ieee")
    return acc


@triton.jit
def scale_sums(
    acc, factor, x_scale, bias, own, row, here, there, ROUNDED: tl.constexpr, BIASED: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Returns products [N, M] of sums: times the factors of features ``own`` and of rows, plus biases."""
    value = acc.to(tl.float32) * tl.load(factor + own, mask=there, other=0.0)[:, None]
    if CONVERTS:
        value = value / _SHIFTED
    if ROUNDED:
        value = value * tl.load(x_scale + row, mask=here, other=0.0)[None, :]
    if BIASED:
        value += tl.load(bias + own, mask=there, other=0.0).to(tl.float32)[:, None]
    return value


def take_floats(kind: str, high: bool, shift: int, scale: int) -> str:
    """Returns PTX that takes the low or high 4 bits of each byte of ``$2`` as values of 4-bit floats, two pairs of
    ``kind``: bits of sign and magnitude in their places make a number that is too small by a power of two, ``scale``.
    """
    begin = "mov.b32 c, $2;" if high else "shl.b32 c, $2, 4;"
    kept = (0x7000 >> shift) * 0x10001
    return f"""{{
    .reg .b32 a, b, c, d, size, none;
    {begin}
    mov.b32 size, {scale * 0x10001:#x};
    mov.b32 none, 0x80008000;
    prmt.b32 a, c, 0, 0x1404;
    prmt.b32 b, c, 0, 0x3424;
    shr.u32 c, a, {shift};
    shr.u32 d, b, {shift};
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x80008000;
    lop3.b32 a, c, {kept:#x}, a, 0xea;
    lop3.b32 b, d, {kept:#x}, b, 0xea;
    fma.rn.{kind} $0, a, size, none;
    fma.rn.{kind} $1, b, size, none;
    }}"""


# e2m1's exponent counts from 1: from 127 in bfloat16, from 15 in float16. Scales are 2^126 and 2^14.
_FP4_BF16 = tl.constexpr(take_floats("bf16x2", False, 6, 0x7E80))
_FP4_BF16_HIGH = tl.constexpr(take_floats("bf16x2", True, 6, 0x7E80))
_FP4_F16 = tl.constexpr(take_floats("f16x2", False, 3, 0x7400))
_FP4_F16_HIGH = tl.constexpr(take_floats("f16x2", True, 3, 0x7400))


@triton.jit
def decode_fp4(held, half: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Returns the values of 4-bit floats, of the ``half`` of each byte, in ``dtype``: exact in any of them."""
    if PACKED and dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            _FP4_BF16 if half == 0 else _FP4_BF16_HIGH, "=r,=r,r", [held], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif PACKED:
        numbers = tl.inline_asm_elementwise(
            _FP4_F16 if half == 0 else _FP4_F16_HIGH, "=r,=r,r", [held], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        bits = ((held >> (4 * half)) & 15).to(tl.uint16)
        small = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
        numbers = (small.to(tl.float32) * 16384.0).to(dtype)
    return numbers


@triton.jit(do_not_specialize=["top"])
def gather_pairs_kernel(
    out, x, gather, order, owner, width, columns, top, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes the columns of one pair's row in the order of its expert: out [pairs, columns]."""
    place = tl.program_id(0)
    expert = tl.load(owner + place // M).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + place).to(tl.int64)
        if pair >= 0:
            at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = at < columns
            source = tl.load(gather + expert * columns + at, mask=inside, other=0)
            values = tl.load(x + (pair // top) * width + source, mask=inside, other=0.0)
            tl.store(out + pair * columns + at, values, mask=inside)
