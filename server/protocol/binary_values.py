"""Vectors as bytes: the number formats that clients may ask for. numpy."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trencadis.server.protocol.pooler_output import Float32

ValueFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
"""vLLM's names of the formats."""
ByteOrder = Literal["native", "little", "big"]
"""``native`` is little, whatever machine this runs on."""
ENCODINGS = ("float", "base64", "bytes", "bytes_only")
"""How a vector is sent: JSON numbers, a text, or a body of bytes, with or without a header that describes it."""


def encode_values(values: Float32, dtype: ValueFormat, order: ByteOrder) -> bytes:
    """``values`` in a format of ``dtype``, rounded to nearest; what is too large becomes infinite, or NaN in e4m3."""
    made = _convert(values, dtype)
    return made.astype(made.dtype.newbyteorder(">" if order == "big" else "<")).tobytes()


def encode_base64(values: Float32, dtype: ValueFormat = "float32", order: ByteOrder = "native") -> str:
    """``encode_values`` as a text; by default what OpenAI's clients read."""
    return base64.b64encode(encode_values(values, dtype, order)).decode()


def _convert(values: Float32, dtype: ValueFormat) -> NDArray[Any]:
    """An array whose items have the bits of ``dtype``."""
    if dtype == "float32":
        return values.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    return _round_to_fp8(values, 3 if dtype == "fp8_e4m3" else 2)


def _round_to_fp8(values: Float32, mantissa: int) -> NDArray[np.uint8]:
    """The nearest 8-bit floats, ties to even; ``mantissa``: 3 bits (e4m3fn) or 2 (e5m2)."""
    known, infinite = _list_fp8_values(mantissa)
    size = np.abs(values.astype(np.float64))
    above = np.searchsorted(known, size).clip(1, len(known) - 1)
    low, high = size - known[above - 1], known[above] - size
    down = (low < high) | ((low == high) & (above % 2 == 1))
    codes = np.where(down, above - 1, above)
    # Half a step above the largest number rounds to infinity, which e4m3fn does not have.
    codes = np.where(codes == len(known) - 1, infinite, codes)
    codes = np.where(np.isnan(size), 0x7F, codes)
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


@cache
def _list_fp8_values(mantissa: int) -> tuple[NDArray[np.float64], int]:
    """The magnitudes of the codes from 0 on, with the next one that does not fit, and the code that it becomes."""
    infinite = 0x7F if mantissa == 3 else 0x7C
    codes = np.arange(infinite + 1)
    exponents, fractions = codes >> mantissa, codes & ((1 << mantissa) - 1)
    bias = 7 if mantissa == 3 else 15
    parts = fractions / (1 << mantissa)
    scaled = np.where(exponents > 0, (1 + parts) * 2.0 ** (exponents - bias), parts * 2.0 ** (1 - bias))
    return scaled, infinite
