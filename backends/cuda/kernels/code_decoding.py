"""Codes of quantised weights decoded into numbers that are exact in float16 and bfloat16, by a launch's own way.

PACKED launches hold PTX that takes four bytes at a time: a 4-bit code is set into the last bits of 128 (in float16, of
1,024), from which one operation a pair subtracts that number and the zero point, so that zero points cost nothing. An
8-bit float's bits are moved to where a 16-bit float has them. From ``ROUNDS_FLOATS`` on a card converts e4m3 by an
instruction of its own, to float16 or, from sm_100 on, to bfloat16. The interpreter and other cards take shifts.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.weights.quantised_weight import (
    E4M3,
    INT4,
    INT8,
    MIDDLE,
    ROUNDS_FLOATS,
    QuantisedWeight,
)

NO_CONVERSION, TO_FLOAT16, TO_BFLOAT16 = range(3)
"""Types that a card converts e4m3 to by an instruction: none, float16 alone, or float16 and bfloat16."""

PTX_TO_BFLOAT16 = 100, 92
"""Compute capability x 10, and version of PTX x 10, from which e4m3 is converted to bfloat16."""

PLACED = 2.0**120
"""Factor by which bits of an e4m3 that are moved to their places in a bfloat16 are smaller than the value."""

_INT4, _INT8, _E4M3, _MIDDLE = tl.constexpr(INT4), tl.constexpr(INT8), tl.constexpr(E4M3), tl.constexpr(MIDDLE)
_TO_BFLOAT16 = tl.constexpr(TO_BFLOAT16)


def is_packed(dtype: torch.dtype) -> bool:
    """True if codes are decoded four at a time by PTX, which the interpreter and other cards do not have."""
    return dtype.itemsize == 2 and in_use().runs_ptx and not knobs.runtime.interpret


def find_conversion(w: QuantisedWeight, device: torch.device) -> int:
    """Returns what the card itself, by PTX, converts the weight's codes to: ``NO_CONVERSION``, ``TO_FLOAT16`` or
    ``TO_BFLOAT16``.
    """
    arch = tile_sizes.arch_of(device)
    if w.kind != E4M3 or not in_use().runs_ptx or knobs.runtime.interpret or arch < ROUNDS_FLOATS:
        return NO_CONVERSION
    return TO_BFLOAT16 if arch >= PTX_TO_BFLOAT16[0] and _ptx_version(arch) >= PTX_TO_BFLOAT16[1] else TO_FLOAT16


def places_floats(w: QuantisedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """True if a product of few rows takes e4m3 codes as bits in their places of a bfloat16 (``place_floats``), since
    the card does not convert them to it. Only tensor cores that keep subnormal operands may.
    """
    keeps = knobs.runtime.interpret or is_packed(dtype)
    return w.kind == E4M3 and dtype == torch.bfloat16 and keeps and find_conversion(w, device) != TO_BFLOAT16


@cache
def _ptx_version(arch: int) -> int:
    """Version x 10 of the PTX that Triton's assembler for ``arch`` takes."""
    from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

    return int(ptx_get_version(get_ptxas(arch).version))


def take_codes(kind: str, one: int, above: int, high: bool) -> str:
    """Returns PTX that takes the low or high 4 bits of each byte of ``$2`` as two pairs of ``kind``, and adds ``$3``
    and ``$4`` to them.

    Args:
        one: bits of a pair of ones.
        above: the byte above a code that makes it a number, once in each place: 128 + code in bfloat16, 1,024 + code
            in float16.
    """
    shift = "shr.u32 a, $2, 4;\nand.b32 a, a, 0x0f0f0f0f;" if high else "and.b32 a, $2, 0x0f0f0f0f;"
    return f"""{{
    .reg .b32 a, b, one;
    mov.b32 one, {one:#x};
    {shift}
    prmt.b32 b, a, {above:#x}, 0x5342;
    prmt.b32 a, a, {above:#x}, 0x5140;
    fma.rn.{kind} $0, a, one, $3;
    fma.rn.{kind} $1, b, one, $4;
    }}"""


_LOW_BF16 = tl.constexpr(take_codes("bf16x2", 0x3F803F80, 0x43434343, False))
_HIGH_BF16 = tl.constexpr(take_codes("bf16x2", 0x3F803F80, 0x43434343, True))
_LOW_F16 = tl.constexpr(take_codes("f16x2", 0x3C003C00, 0x64646464, False))
_HIGH_F16 = tl.constexpr(take_codes("f16x2", 0x3C003C00, 0x64646464, True))


def move_bits(shift: int, mask: int) -> str:
    """Returns PTX that makes two pairs of 16-bit floats of four e4m3 codes by their bits alone: the sign stays the
    first bit, and exponent and mantissa are ``shift`` bits behind it.

    Each code is the upper byte of a half word; the byte between two codes holds copies of the lower one's sign, of
    which the shift brings one to the place of that half's sign.
    """
    return f"""{{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x1804;
    prmt.b32 b, $2, 0, 0x3a24;
    shr.s32 a, a, {shift};
    shr.s32 b, b, {shift};
    and.b32 $0, a, {mask:#x};
    and.b32 $1, b, {mask:#x};
    }}"""


_BITS_F16 = tl.constexpr(move_bits(1, 0xBF80BF80))
"""e4m3 / ``SHIFTED``, in float16."""

_PLACED_BF16 = tl.constexpr(move_bits(4, 0x87F087F0))
"""e4m3 / ``PLACED``, in bfloat16. Codes below 2^-6 are subnormal bfloat16 then."""

_BITS_BF16 = tl.constexpr("""{
    .reg .b32 a, b, by, none;
    mov.b32 by, 0x77807780;
    mov.b32 none, 0x80008000;
    prmt.b32 a, $2, 0, 0x1804;
    prmt.b32 b, $2, 0, 0x3a24;
    shr.s32 a, a, 4;
    shr.s32 b, b, 4;
    and.b32 a, a, 0x87f087f0;
    and.b32 b, b, 0x87f087f0;
    fma.rn.bf16x2 $0, a, by, none;
    fma.rn.bf16x2 $1, b, by, none;
    }""")
"""Two pairs of bfloat16, e4m3 / ``SHIFTED``: the moved bits are 2^-120 of the value, of which 2^112 is made up for."""


def convert_floats(kind: str) -> str:
    """Returns PTX that converts four e4m3 codes of ``$2`` to two pairs of ``kind``."""
    return f"""{{
    .reg .b16 low, high;
    mov.b32 {{low, high}}, $2;
    cvt.rn.{kind}.e4m3x2 $0, low;
    cvt.rn.{kind}.e4m3x2 $1, high;
    }}"""


_CONVERTED_F16 = tl.constexpr(convert_floats("f16x2"))
_CONVERTED_BF16 = tl.constexpr(convert_floats("bf16x2"))

_WIDENED_BF16 = tl.constexpr("""{
    .reg .b16 low, high, p, q, r, s;
    .reg .b32 a, b;
    .reg .f32 w, x, y, z;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mov.b32 {p, q}, a;
    mov.b32 {r, s}, b;
    cvt.f32.f16 w, p;
    cvt.f32.f16 x, q;
    cvt.f32.f16 y, r;
    cvt.f32.f16 z, s;
    cvt.rn.bf16x2.f32 $0, x, w;
    cvt.rn.bf16x2.f32 $1, z, y;
    }""")
"""By way of float32: compilers convert a float16 to bfloat16 by an instruction of a quarter of the rate."""


@triton.jit
def decode_codes(
    held, half: tl.constexpr, zero, dtype: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Returns codes ``held`` less zero points, which broadcast to them, as numbers that are exact in 16 bits, of
    ``dtype`` or of a type to convert to it; of 4 bits the ``half`` of each byte. E4m3 is divided by ``SHIFTED`` unless
    the card CONVERTS it.
    """
    if KIND == _INT4:
        less = tl.full([1, 1], _MIDDLE, tl.int32)
        if ZERO:
            less = zero.to(tl.int32)
        codes = decode_pairs(held, less, half, dtype) if PACKED else ((held >> (4 * half)) & 15).to(tl.int32) - less
    elif KIND == _INT8:
        codes = held
        if ZERO:
            codes = held.to(tl.int16) - zero.to(tl.int16)
    elif KIND == _E4M3 and (CONVERTS or PACKED):
        codes = decode_floats(held, dtype, CONVERTS)
    elif KIND == _E4M3:
        bits = held.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        codes = (held.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def decode_pairs(held, less, half: tl.constexpr, dtype: tl.constexpr):
    """Returns 4-bit codes of uint8 values minus ``less``, which broadcasts to them, in ``dtype``, four bytes at a
    time.
    """
    if dtype == tl.bfloat16:
        away = tl.broadcast_to((-128 - less).to(dtype), held.shape)
        codes = tl.inline_asm_elementwise(
            _LOW_BF16 if half == 0 else _HIGH_BF16, "=r,=r,r,r,r", [held, away], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        away = tl.broadcast_to((-1024 - less).to(dtype), held.shape)
        codes = tl.inline_asm_elementwise(
            _LOW_F16 if half == 0 else _HIGH_F16, "=r,=r,r,r,r", [held, away], dtype=tl.float16, is_pure=True, pack=4
        )
    return codes


@triton.jit
def decode_floats(held, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    """Returns e4m3 codes (uint8) as bfloat16, or as float16 if ``dtype`` is another type; divided by ``SHIFTED`` unless
    the card CONVERTS them.
    """
    if dtype == tl.bfloat16:
        wide: tl.constexpr = _CONVERTED_BF16 if CONVERTS == _TO_BFLOAT16 else _WIDENED_BF16
        codes = tl.inline_asm_elementwise(
            wide if CONVERTS else _BITS_BF16, "=r,=r,r", [held], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        codes = tl.inline_asm_elementwise(
            _CONVERTED_F16 if CONVERTS else _BITS_F16, "=r,=r,r", [held], dtype=tl.float16, is_pure=True, pack=4
        )
    return codes


@triton.jit
def place_floats(held, PACKED: tl.constexpr):
    """Returns e4m3 codes (uint8) as bfloat16, divided by ``PLACED``."""
    if PACKED:
        codes = tl.inline_asm_elementwise(_PLACED_BF16, "=r,=r,r", [held], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = held.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
    return codes
