"""Products with quantised weights: codes are read as they are stored and decoded on the way into the tensor cores.

With up to ``FEW`` rows the columns are cut into pieces that run in parallel, and a second kernel adds them in their
order; more rows run in tiles. How columns are cut follows from the weight's shape alone, so a row has the same bits
whatever other rows the launch has, as long as the class of rows is the same.

Codes are multiplied without their scales, and each group's sum by its scale: 8-bit integers and floats are exact in 16
bits. 8-bit activations are rounded first (``activation_rounding``); integers are then multiplied as integers.

A tile of rows decodes the weight that it multiplies by. From ``DECODED_ROWS`` rows on that would be done often: then a
piece of the weight at a time is decoded into a scratch, once, and multiplied by the library's product. Floats of 8 bits
in blocks of 128 take a product of the library's that knows their scales, where there is one (``block_scaled_linear``).
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import block_scaled_linear, tile_sizes
from trencadis.backends.cuda.kernels.activation_rounding import RoundedRows, Rounding, round_to
from trencadis.backends.cuda.kernels.code_decoding import decode_codes, find_conversion, is_packed
from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.weights.decoded_pieces import DENSE_TILE, choose_piece
from trencadis.backends.cuda.weights.quantised_weight import (
    E4M3,
    INT4,
    INT8,
    SHIFTED,
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

_INT8, _INT4, _E4M3 = tl.constexpr(INT8), tl.constexpr(INT4), tl.constexpr(E4M3)
_SHIFTED = tl.constexpr(SHIFTED)


def linear(x: Tensor | RoundedRows, w: QuantisedWeight) -> Tensor:
    """Multiplies [n, in] -> [n, out] in ``x``'s dtype: float16, bfloat16 or float32. Rows that were rounded before must
    be as ``choose_rounding`` says of this weight.
    """
    if isinstance(x, RoundedRows):
        return _multiply_rounded(x, w)
    check(x, w)
    n, dtype = x.shape[0], x.dtype
    if not n:
        return torch.empty((n, w.out_features), dtype=dtype, device=x.device)
    x = x.contiguous() if w.gather is None else x.index_select(1, w.gather)
    how = choose_rounding(w, n, dtype)
    return _multiply_values(x, w) if how is None else _multiply_rounded(round_to(x, how), w)


def choose_rounding(w: QuantisedWeight, rows: int, dtype: torch.dtype) -> Rounding | None:
    """Returns how the activations of a product of ``rows`` rows are rounded; None: they are not."""
    if w.blocks is not None:
        return block_scaled_linear.choose_rounding(rows, dtype)
    if not w.rounds:
        return None
    if w.kind == INT8:
        return Rounding(INT8, torch.int8)
    return Rounding(E4M3, dtype if rows <= FEW else torch.float8_e4m3fn)


def _multiply_values(x: Tensor, w: QuantisedWeight) -> Tensor:
    """Multiplies by activations as they are."""
    out = torch.empty((x.shape[0], w.out_features), dtype=x.dtype, device=x.device)
    if x.shape[0] >= DECODED_ROWS and x.dtype.itemsize == 2:
        return _multiply_decoded(x, w, out)
    return _multiply(x, None, w, out)


def _multiply_rounded(x: RoundedRows, w: QuantisedWeight) -> Tensor:
    """Multiplies by activations that were rounded for this weight."""
    how = x.rounding
    assert how == choose_rounding(w, x.rows, x.dtype) and x.shape[1] == w.in_features, (how, x.shape)
    if how.group:
        return _multiply_values(x.codes, w) if how.values else block_scaled_linear.multiply(x, w)
    if how.to != torch.float8_e4m3fn:
        out = torch.empty((x.rows, w.out_features), dtype=x.dtype, device=x.codes.device)
        return _multiply(x.codes, x.scale, w, out)
    return torch._scaled_mm(
        x.codes,
        w.codes.view(torch.float8_e4m3fn).t(),
        scale_a=x.scale[:, None],
        scale_b=w.factor[None],
        bias=w.bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


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


def _multiply_decoded(x: Tensor, w: QuantisedWeight, out: Tensor) -> Tensor:
    """Decodes a piece of the features at a time and multiplies by it."""
    most = DECODED_BYTES // (w.columns * x.itemsize)
    each = choose_piece(x.shape[0], w.out_features, w.columns, most, count_processors(x.device))
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


def decode_features(w: QuantisedWeight, start: int, stop: int, out: Tensor) -> None:
    """Decodes features [start, stop) into ``out`` [stop - start, columns], each value rounded once."""
    each = span(w)
    decoding_kernel[(-(-(stop - start) // DENSE_TILE), -(-w.columns // each))](
        out, w.codes, w.factor, w.factor if w.scale is None else w.scale, w.factor if w.zero is None else w.zero,
        start, stop, w.out_features, w.columns, w.codes.shape[1],
        KIND=w.kind, GROUP=w.group, SPAN=each, ZERO=w.zero is not None, WHOLE=w.columns % each == 0,
        PACKED=is_packed(out.dtype), CONVERTS=find_conversion(w, out.device), N=DENSE_TILE, num_warps=4,
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
        CONVERTS=find_conversion(w, out.device), M=tile.m, N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if cut > 1:
        added_kernel[(n, -(-features // BLOCK))](
            out, part, xs, w.factor, bias, n, features, cut, SHIFT=SHIFTED if find_conversion(w, out.device) else 1.0,
            ROUNDED=x_scale is not None, BIAS=w.bias is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


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
            for half in tl.static_range(2):
                acc = add_product(acc, held, half, x_row, scale, zero, begin + half * HALF, features, columns, feature,
                                  here, there, KIND, GROUP, HALF, ZERO, ROUNDED, WHOLE, PACKED, CONVERTS)  # fmt: skip
        else:
            at = i * SPAN + tl.arange(0, SPAN)
            inside = there[None, :] if WHOLE else there[None, :] & (at < columns)[:, None]
            held = tl.load(code_row[None, :] + at[:, None], mask=inside, other=0)
            acc = add_product(acc, held, 0, x_row, scale, zero, i * SPAN, features, columns, feature, here, there,
                              KIND, GROUP, SPAN, ZERO, ROUNDED, WHOLE, PACKED, CONVERTS)  # fmt: skip
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
    acc, held, half: tl.constexpr, x_row, scale, zero, begin, features, columns, feature, here, there,
    KIND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr, ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr, PACKED: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Returns ``acc`` plus the product of columns [begin, begin + WIDTH), whose codes are ``held`` [WIDTH, N]; those of
    4 bits the ``half`` of each byte.
    """
    at = begin + tl.arange(0, WIDTH)
    inside = here[:, None] if WHOLE else here[:, None] & (at < columns)[None, :]
    values = tl.load(x_row[:, None] + at[None, :], mask=inside, other=0)
    if ROUNDED and KIND == _INT8:
        acc = tl.dot(values, held, acc, input_precision="ieee", out_dtype=tl.int32)
    else:
        group = feature
        if GROUP:  # the second half of the last step may lie beyond the last group
            group = (tl.minimum(begin, columns - 1) // GROUP).to(tl.int64) * features + feature
        less = tl.load(zero + group, mask=there, other=0)[None, :] if ZERO else 0
        codes = decode_codes(held, half, less, values.dtype, KIND, ZERO, PACKED, CONVERTS).to(values.dtype)
        if GROUP:
            size = tl.load(scale + group, mask=there, other=0.0).to(tl.float32)
            acc += tl.dot(values, codes, input_precision="ieee") * size[None, :]
        else:
            acc = tl.dot(values, codes, acc, input_precision="ieee")
    return acc


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
        for half in tl.static_range(2):
            store_values(held, half, row, size, scale, zero, begin + half * HALF, features, columns, feature, there,
                         KIND, GROUP, HALF, ZERO, WHOLE, PACKED, CONVERTS)  # fmt: skip
    else:
        at = begin + tl.arange(0, SPAN)
        inside = there[:, None] if WHOLE else there[:, None] & (at < columns)[None, :]
        held = tl.load((codes + feature * width)[:, None] + at[None, :], mask=inside, other=0)
        store_values(held, 0, row, size, scale, zero, begin, features, columns, feature, there,
                     KIND, GROUP, SPAN, ZERO, WHOLE, PACKED, CONVERTS)  # fmt: skip


@triton.jit
def store_values(
    held, half: tl.constexpr, row, size, scale, zero, begin, features, columns, feature, there,
    KIND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Stores the values of columns [begin, begin + WIDTH), whose codes are ``held`` [N, WIDTH]; those of 4 bits the
    ``half`` of each byte.
    """
    group = feature
    if GROUP:  # the second half of the last step may lie beyond the last group
        group = (tl.minimum(begin, columns - 1) // GROUP).to(tl.int64) * features + feature
        size = size * tl.load(scale + group, mask=there, other=0.0).to(tl.float32)
    less = tl.load(zero + group, mask=there, other=0)[:, None] if ZERO else 0
    kind: tl.constexpr = tl.float16 if KIND == _E4M3 else row.dtype.element_ty  # float16 becomes float32 at once
    numbers = decode_codes(held, half, less, kind, KIND, ZERO, PACKED, CONVERTS).to(tl.float32)
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
