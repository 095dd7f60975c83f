"""Products with quantised weights: codes are read as they are stored and decoded on the way into the tensor cores.

With up to ``FEW`` rows the columns are cut into pieces that run in parallel, and a second kernel adds them in their
order; more rows run in tiles. How columns are cut follows from the weight's shape alone, so a row has the same bits
whatever other rows the launch has, as long as the class of rows is the same.

Codes are multiplied without their scales, and each group's sum by its scale: 8-bit integers and floats are exact in 16
bits. 8-bit activations are rounded first, with one scale per token; integers are then multiplied as integers.

A tile of rows decodes the weight that it multiplies by. From ``DECODED_ROWS`` rows on that would be done often: then a
piece of the weight at a time is decoded into a scratch, once, and multiplied by the library's product.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.weights.quantised_weight import (
    E4M3,
    INT4,
    INT8,
    ROUNDS_FLOATS,
    SHIFTED,
    TINY,
    QuantisedWeight,
)
from trencadis.core.quant.quantised_weight_layout_and_bytes import DECODED_BYTES, DECODED_ROWS, half_of

FEW, SOME = 15, 64
"""Maximum rows of a launch that is cut by columns, and of one in small tiles."""

STEP = 64
"""Number of columns of a step; a step crosses no group."""

PROGRAMS, LEAST_STEPS = 264, 4
"""Maximum programs of a launch of few rows, and fewest steps of one: two programs for each processor of an H100."""

BLOCK = 1024

DENSE_TILE = 64
"""Features of a program that decodes a weight."""

LIBRARY_TILE = 128, 256
"""Rows and features of a program of a library's product, as cuBLAS has them for large products on an H100."""

_INT8, _INT4, _E4M3 = tl.constexpr(INT8), tl.constexpr(INT4), tl.constexpr(E4M3)
_MIDDLE = tl.constexpr(8)
_SHIFTED = tl.constexpr(SHIFTED)
_NEAREST = tl.constexpr(12582912.0)
"""1.5 x 2^23: adding it to a float32 and subtracting it again rounds to the nearest integer."""


def linear(x: Tensor, w: QuantisedWeight) -> Tensor:
    """Multiplies [n, in] -> [n, out] in ``x``'s dtype: float16, bfloat16 or float32."""
    check(x, w)
    n, dtype = x.shape[0], x.dtype
    out = torch.empty((n, w.out_features), dtype=dtype, device=x.device)
    if not n:
        return out
    x = x.contiguous() if w.gather is None else x.index_select(1, w.gather)
    if not w.rounds and n >= DECODED_ROWS and dtype.itemsize == 2:
        return _multiply_decoded(x, w, out)
    if not w.rounds:
        return _multiply(x, None, w, out)
    if w.kind == E4M3 and n > FEW:
        codes, scale = round_rows(x, torch.float8_e4m3fn)
        weight = w.codes.view(torch.float8_e4m3fn).t()
        return torch._scaled_mm(
            codes,
            weight,
            scale_a=scale[:, None] / SHIFTED,
            scale_b=w.factor[None],
            bias=w.bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    return _multiply(*round_rows(x, torch.int8 if w.kind == INT8 else dtype), w, out)


def check(x: Tensor, w: QuantisedWeight) -> None:
    """Asserts: x [n, in] of a floating dtype, and a weight whose parts fit each other."""
    assert x.ndim == 2 and x.shape[1] == w.in_features, (x.shape, w.in_features)
    assert w.codes.is_contiguous() and w.codes.shape[0] == w.out_features and w.factor.shape == (w.out_features,)
    assert w.codes.dtype == (torch.int8 if w.kind == INT8 else torch.uint8)
    for part in (w.scale, w.zero):
        assert part is None or (part.is_contiguous() and part.shape[1] == w.out_features)


def span(w: QuantisedWeight) -> int:
    """Returns the columns of one step."""
    return 2 * half_of(w.group) if w.kind == INT4 else gcd(w.group, STEP) if w.group else STEP


def pieces(features: int, steps: int, n: int) -> int:
    """Returns how many pieces the columns are cut into with few rows; depends only on the weight's shape."""
    return max(min(-(-PROGRAMS // -(-features // n)), steps // LEAST_STEPS), 1)


def tile_of(w: QuantisedWeight, rows: int, dtype: torch.dtype, device: torch.device) -> tile_sizes.Tile:
    """Returns the tile; m: rows, n: output features.

    The table's ``head`` is the bits of a code; its ``group`` is 1 where groups have scales, which take a second sum.
    """
    length = "few" if rows <= FEW else "some" if rows <= SOME else "many"
    bits = 4 if w.kind == INT4 else 8
    found = tile_sizes.FORCED.get("quantised")
    return found or tile_sizes.find(
        "quantised", tile_sizes.arch_of(device), dtype.itemsize * 8, bits, int(w.group > 0), length
    )


def is_packed(dtype: torch.dtype) -> bool:
    """True if codes are decoded four at a time by PTX, which the interpreter and other cards do not have."""
    return dtype.itemsize == 2 and in_use().runs_ptx and not knobs.runtime.interpret


def converts(w: QuantisedWeight, device: torch.device) -> bool:
    """True if the card has a conversion of its own for the weight's 8-bit floats, which is written in PTX."""
    ptx = in_use().runs_ptx and not knobs.runtime.interpret
    return w.kind == E4M3 and ptx and tile_sizes.arch_of(device) >= ROUNDS_FLOATS


def _multiply_decoded(x: Tensor, w: QuantisedWeight, out: Tensor) -> Tensor:
    """Decodes a piece of the features at a time and multiplies by it."""
    most = DECODED_BYTES // (w.columns * x.itemsize)
    each = choose_piece(x.shape[0], w.out_features, most, count_processors(x.device))
    scratch = x.new_empty(min(each, w.out_features), w.columns)
    for start in range(0, w.out_features, each):
        stop = min(start + each, w.out_features)
        held = scratch[: stop - start]
        decode_features(w, start, stop, held)
        if w.bias is None:
            torch.mm(x, held.t(), out=out[:, start:stop])
        else:
            torch.addmm(w.bias[start:stop], x, held.t(), out=out[:, start:stop])
    return out


def count_processors(device: torch.device) -> int:
    """Returns the processors of a card; those of an H100 for a device that is none."""
    cards = in_use()
    return cards.processors(device) if device.type == cards.name else PROGRAMS // 2


def choose_piece(rows: int, features: int, most: int, processors: int) -> int:
    """Returns the features of a piece of at most ``most``: of those whose products by a library take the fewest waves
    of programs over all pieces, the largest, since a wave that few programs fill takes as long as a full one.
    """
    high, wide = LIBRARY_TILE
    tiles = -(-rows // high)

    def count_waves(each: int) -> int:
        whole, rest = divmod(features, each)
        return whole * -(-tiles * -(-each // wide) // processors) + -(-tiles * -(-rest // wide) // processors)

    sizes = range(wide, min(most, features + wide - 1) + 1, wide)
    return min(sizes, key=lambda each: (count_waves(each), -each), default=max(most // DENSE_TILE, 1) * DENSE_TILE)


def decode_features(w: QuantisedWeight, start: int, stop: int, out: Tensor) -> None:
    """Decodes features [start, stop) into ``out`` [stop - start, columns], each value rounded once."""
    each = span(w)
    decoding_kernel[(-(-(stop - start) // DENSE_TILE), -(-w.columns // each))](
        out, w.codes, w.factor, w.factor if w.scale is None else w.scale, w.factor if w.zero is None else w.zero,
        start, stop, w.out_features, w.columns, w.codes.shape[1],
        KIND=w.kind, GROUP=w.group, SPAN=each, ZERO=w.zero is not None, WHOLE=w.columns % each == 0,
        PACKED=is_packed(out.dtype), CONVERTS=converts(w, out.device), N=DENSE_TILE, num_warps=4,
    )  # fmt: skip


def _multiply(x: Tensor, x_scale: Tensor | None, w: QuantisedWeight, out: Tensor) -> Tensor:
    n, features = out.shape
    tile = tile_of(w, n, out.dtype, out.device)
    each = span(w)
    steps = -(-w.columns // each)
    cut = pieces(features, steps, tile.n) if n <= FEW else 1
    part = torch.empty((cut, n, features), dtype=torch.float32, device=out.device) if cut > 1 else out
    bias = out if w.bias is None else w.bias
    xs = w.factor if x_scale is None else x_scale
    quantised_kernel[(-(-n // tile.m), -(-features // tile.n), cut)](
        part, x, xs, w.codes, w.factor, w.factor if w.scale is None else w.scale, x if w.zero is None else w.zero,
        bias, n, features, w.columns, w.codes.shape[1], -(-steps // cut),
        KIND=w.kind, GROUP=w.group, SPAN=each, ZERO=w.zero is not None, ROUNDED=x_scale is not None,
        BIAS=w.bias is not None, CUT=cut > 1, WHOLE=w.columns % each == 0, PACKED=is_packed(x.dtype),
        CONVERTS=converts(w, out.device), M=tile.m, N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if cut > 1:
        added_kernel[(n, -(-features // BLOCK))](
            out, part, xs, w.factor, bias, n, features, cut, SHIFT=SHIFTED if converts(w, out.device) else 1.0,
            ROUNDED=x_scale is not None, BIAS=w.bias is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def round_rows(x: Tensor, to: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds x to (codes [n, in], float32 scales [n]): int8, float8_e4m3fn, or e4m3's values in ``x``'s own dtype."""
    held = torch.uint8 if to == torch.float8_e4m3fn else to
    codes = torch.empty(x.shape, dtype=held, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    most = 127.0 if to == torch.int8 else 448.0
    rounding_kernel[(x.shape[0],)](
        x, codes, scale, x.shape[1], most, TINY, WHOLE=to == torch.int8, BITS=held == torch.uint8, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return codes.view(to), scale


@triton.jit(do_not_specialize=["rows"])
def quantised_kernel(
    out, x, x_scale, codes, factor, scale, zero, bias, rows, features, columns, width, steps,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, ROUNDED: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    feature = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    piece = tl.program_id(2)
    here, there = row < rows, feature < features
    first = piece * steps
    last = tl.minimum(first + steps, tl.cdiv(columns, SPAN))
    x_row, code_row = x + row * columns, codes + feature * width
    acc = tl.zeros([M, N], tl.int32 if ROUNDED and KIND == _INT8 else tl.float32)
    for i in range(first, last):
        if KIND == _INT4:
            HALF: tl.constexpr = SPAN // 2
            at = i * HALF + tl.arange(0, HALF)
            held = tl.load(code_row[None, :] + at[:, None], mask=there[None, :], other=0)
            begin = i * SPAN
            low, high = split_codes(held, x.dtype.element_ty, PACKED)
            acc = add_product(acc, low, x_row, scale, zero, begin, features, columns, feature, here, there,
                        KIND, GROUP, HALF, ZERO, ROUNDED, WHOLE, CONVERTS)  # fmt: skip
            acc = add_product(acc, high, x_row, scale, zero, begin + HALF, features, columns, feature, here, there,
                        KIND, GROUP, HALF, ZERO, ROUNDED, WHOLE, CONVERTS)  # fmt: skip
        else:
            at = i * SPAN + tl.arange(0, SPAN)
            inside = there[None, :] if WHOLE else there[None, :] & (at < columns)[:, None]
            held = tl.load(code_row[None, :] + at[:, None], mask=inside, other=0)
            acc = add_product(acc, held, x_row, scale, zero, i * SPAN, features, columns, feature, here, there,
                        KIND, GROUP, SPAN, ZERO, ROUNDED, WHOLE, CONVERTS)  # fmt: skip
    address = row[:, None] * features + feature[None, :]
    kept = here[:, None] & there[None, :]
    if CUT:
        tl.store(out + piece.to(tl.int64) * rows * features + address, acc.to(tl.float32), mask=kept)
    else:
        value = acc.to(tl.float32) * tl.load(factor + feature, mask=there, other=0.0)[None, :]
        if CONVERTS:
            value = value / _SHIFTED
        if ROUNDED:
            value = value * tl.load(x_scale + row, mask=here, other=0.0)[:, None]
        if BIAS:
            value += tl.load(bias + feature, mask=there, other=0.0).to(tl.float32)[None, :]
        tl.store(out + address, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def add_product(
    acc, held, x_row, scale, zero, begin, features, columns, feature, here, there,
    KIND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr, ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Returns ``acc`` plus the product of columns [begin, begin + WIDTH), whose codes are ``held`` [WIDTH, N]; those of
    4 bits from ``split_codes``.
    """
    at = begin + tl.arange(0, WIDTH)
    inside = here[:, None] if WHOLE else here[:, None] & (at < columns)[None, :]
    values = tl.load(x_row[:, None] + at[None, :], mask=inside, other=0)
    if ROUNDED and KIND == _INT8:
        acc = tl.dot(values, held, acc, input_precision="ieee", out_dtype=tl.int32)
    elif GROUP:  # the second half of the last step may lie beyond the last group
        group = (tl.minimum(begin, columns - 1) // GROUP).to(tl.int64) * features + feature
        codes = decode_numbers(held, zero + group, there, KIND, ZERO, CONVERTS).to(values.dtype)
        size = tl.load(scale + group, mask=there, other=0.0).to(tl.float32)
        acc += tl.dot(values, codes, input_precision="ieee") * size[None, :]
    else:
        codes = decode_numbers(held, zero + feature, there, KIND, ZERO, CONVERTS).to(values.dtype)
        acc = tl.dot(values, codes, acc, input_precision="ieee")
    return acc


@triton.jit
def decode_numbers(held, zero, there, KIND: tl.constexpr, ZERO: tl.constexpr, CONVERTS: tl.constexpr):
    """Returns codes [WIDTH, N] minus zero points, as numbers exact in float16 and bfloat16. Floats are their bits in
    float16 (their values, if CONVERTS); 4-bit codes have ``MIDDLE`` subtracted already.
    """
    if KIND == _INT4:
        codes = held
        if ZERO:
            codes = held - (tl.load(zero, mask=there, other=0) - _MIDDLE).to(held.dtype)[None, :]
    elif KIND == _INT8:
        codes = held.to(tl.int16) - tl.load(zero, mask=there, other=0).to(tl.int16)[None, :] if ZERO else held
    elif KIND == _E4M3 and CONVERTS:
        codes = convert_floats(held)
    elif KIND == _E4M3:
        bits = held.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        codes = (held.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def split_codes(held, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Returns (low, high): the 4-bit codes of uint8 values, minus ``MIDDLE``, of a type in which they are exact.

    PACKED: four bytes at a time. A code is set into the last bits of 128 (in float16, of 1,024), from which the number
    and ``MIDDLE`` are subtracted in pairs; the code above it needs no shift in float16, whose bits hold both.
    """
    if PACKED and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, less;
            mov.b32 one, 0x3f803f80;
            mov.b32 less, 0xc308c308;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, less;
            fma.rn.bf16x2 $1, b, one, less;
            fma.rn.bf16x2 $2, c, one, less;
            fma.rn.bf16x2 $3, d, one, less;
            }""",
            "=r,=r,=r,=r,r", [held], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    elif PACKED and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, less, part, rest;
            mov.b32 one, 0x3c003c00;
            mov.b32 less, 0xe408e408;
            mov.b32 part, 0x2c002c00;
            mov.b32 rest, 0xd480d480;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 c, a, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 d, b, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 a, a, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x64006400, 0xea;
            fma.rn.f16x2 $0, a, one, less;
            fma.rn.f16x2 $1, b, one, less;
            fma.rn.f16x2 $2, c, part, rest;
            fma.rn.f16x2 $3, d, part, rest;
            }""",
            "=r,=r,=r,=r,r", [held], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (held & 15).to(tl.int8) - _MIDDLE
        high = (held >> 4).to(tl.int8) - _MIDDLE
    return low, high


@triton.jit
def convert_floats(held):
    """Returns e4m3 codes (uint8) as float16, by the card's own conversion."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [held], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "stop"])
def decoding_kernel(
    out, codes, factor, scale, zero, start, stop, features, columns, width,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, CONVERTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Decodes one step of N features."""
    feature = (start + tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    there = feature < stop
    begin = tl.program_id(1) * SPAN
    size = tl.load(factor + feature, mask=there, other=0.0)
    if CONVERTS:
        size = size / _SHIFTED
    row = out + (feature - start) * columns
    if KIND == _INT4:
        HALF: tl.constexpr = SPAN // 2
        at = tl.program_id(1) * HALF + tl.arange(0, HALF)
        held = tl.load((codes + feature * width)[:, None] + at[None, :], mask=there[:, None], other=0)
        low, high = split_codes(held, out.dtype.element_ty, PACKED)
        store_values(low, row, size, scale, zero, begin, features, columns, feature, there,
                     KIND, GROUP, HALF, ZERO, WHOLE, CONVERTS)  # fmt: skip
        store_values(high, row, size, scale, zero, begin + HALF, features, columns, feature, there,
                     KIND, GROUP, HALF, ZERO, WHOLE, CONVERTS)  # fmt: skip
    else:
        at = begin + tl.arange(0, SPAN)
        inside = there[:, None] if WHOLE else there[:, None] & (at < columns)[None, :]
        held = tl.load((codes + feature * width)[:, None] + at[None, :], mask=inside, other=0)
        store_values(held, row, size, scale, zero, begin, features, columns, feature, there,
                     KIND, GROUP, SPAN, ZERO, WHOLE, CONVERTS)  # fmt: skip


@triton.jit
def store_values(
    held, row, size, scale, zero, begin, features, columns, feature, there,
    KIND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Stores the values of columns [begin, begin + WIDTH), whose codes are ``held`` [N, WIDTH]."""
    group = feature
    if GROUP:  # the second half of the last step may lie beyond the last group
        group = (tl.minimum(begin, columns - 1) // GROUP).to(tl.int64) * features + feature
        size = size * tl.load(scale + group, mask=there, other=0.0).to(tl.float32)
    numbers = tl.trans(decode_numbers(tl.trans(held), zero + group, there, KIND, ZERO, CONVERTS)).to(tl.float32)
    at = begin + tl.arange(0, WIDTH)
    inside = there[:, None] if WHOLE else there[:, None] & (at < columns)[None, :]
    values = (numbers * size[:, None]).to(row.dtype.element_ty)
    tl.store(row[:, None] + at[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["rows", "cut"])
def added_kernel(
    out, part, x_scale, factor, bias, rows, features, cut,
    SHIFT: tl.constexpr, ROUNDED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = feature < features
    at = part + row * features + feature
    value = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, cut):
        value += tl.load(at, mask=there, other=0.0)
        at += rows * features
    value *= tl.load(factor + feature, mask=there, other=0.0) / SHIFT
    if ROUNDED:
        value *= tl.load(x_scale + row)
    if BIAS:
        value += tl.load(bias + feature, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * features + feature, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def round_code(value, most, WHOLE: tl.constexpr):
    """Rounds values, clamped to ``most`` either way, to whole numbers or to numbers of e4m3."""
    value = tl.where(tl.abs(value) <= most, value, tl.where(value > 0, most, -most))
    return (value + _NEAREST) - _NEAREST if WHOLE else float8(value)


@triton.jit(do_not_specialize=["most", "tiny"])
def rounding_kernel(
    x, codes, scale, width, most, tiny, WHOLE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rounds one token so that its largest magnitude gets the largest code. A non-finite value makes its scale, and so
    its row, non-finite.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    peak = tl.zeros([BLOCK], tl.float32)
    spoiled = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(x + row * width + start + lane, mask=start + lane < width, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(value))
        spoiled += value * 0.0
    size = tl.maximum(tl.max(peak, 0), tiny) / most
    tl.store(scale + row, size + tl.sum(spoiled, 0))
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        value = tl.load(x + row * width + start + lane, mask=inside, other=0.0).to(tl.float32) / size
        code = round_code(value, most, WHOLE)
        if BITS:
            code = bits_of(code)
        tl.store(codes + row * width + start + lane, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def float8(value):
    """Rounds float32 values up to 448 to the nearest e4m3: three bits after the leading one, down to steps of 2^-9."""
    power = ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 3
    step = (tl.maximum(power, 118) << 23).to(tl.float32, bitcast=True)
    return ((value / step + _NEAREST) - _NEAREST) * step


@triton.jit
def bits_of(value):
    """Returns int32 codes of e4m3 values in float32: exponents count from 2^-7, and below 2^-6 codes are multiples of
    2^-9.
    """
    size = tl.abs(value)
    normal = (size.to(tl.int32, bitcast=True) >> 20) - 960
    code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    return tl.where(value < 0, code | 0x80, code)
