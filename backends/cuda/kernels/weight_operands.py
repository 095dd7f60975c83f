"""Codes of a weight [features, columns] decoded where a product of few rows takes them: as its first operand.

Codes then go from shared memory to the registers in which a warp multiplies them, a word of four bytes at a time, and
rows of activations, the second operand, need no moves. Zero points are subtracted by the operation that takes a code
out of the number it was set into, so that they cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.quantised_linear import convert_floats
from trencadis.backends.cuda.weights.quantised_weight import E4M3, INT4, INT8, MIDDLE

_INT4, _INT8, _E4M3, _MIDDLE = tl.constexpr(INT4), tl.constexpr(INT8), tl.constexpr(E4M3), tl.constexpr(MIDDLE)


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


@triton.jit
def decode_rows(
    held, half: tl.constexpr, zero, dtype: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Returns codes ``held`` [N, columns] minus zero points [N] as numbers that are exact in 16 bits; of 4 bits the
    ``half`` of each byte. Floats are their bits in float16, or their values if CONVERTS.
    """
    if KIND == _INT4:
        less = tl.full([1, 1], _MIDDLE, tl.int32)
        if ZERO:
            less = zero.to(tl.int32)[:, None]
        codes = decode_pairs(held, less, half, dtype) if PACKED else ((held >> (4 * half)) & 15).to(tl.int32) - less
    elif KIND == _INT8:
        codes = held
        if ZERO:
            codes = held.to(tl.int16) - zero.to(tl.int16)[:, None]
    elif KIND == _E4M3 and CONVERTS:
        codes = convert_to_bfloat16(held) if dtype == tl.bfloat16 else convert_floats(held)
    elif KIND == _E4M3:
        bits = held.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        codes = (held.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def decode_pairs(held, less, half: tl.constexpr, dtype: tl.constexpr):
    """Returns 4-bit codes of uint8 values minus ``less`` [N or 1, 1] in ``dtype``, four bytes at a time."""
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
def convert_to_bfloat16(held):
    """Returns e4m3 codes (uint8) as bfloat16, by the card's own conversion and float32.

    Compilers convert a float16 to bfloat16 by an instruction of a quarter of the rate.
    """
    return tl.inline_asm_elementwise(
        """{
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
        }""",
        "=r,=r,r", [held], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip
