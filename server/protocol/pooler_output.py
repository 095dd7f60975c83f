"""Turns pooled values into embeddings, probabilities and scores, and writes them as JSON or bytes. Uses numpy.

Values are computed in float64. One prompt's values are written in pieces: values of every token are hundreds of
megabytes as objects.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from trencadis.core.checkpoint.pooling_description import CLASSIFY, IDENTITY, SIGMOID, SOFTMAX, Pooling
from trencadis.core.json_types import Json
from trencadis.server.protocol.pooling_params import PoolingParams

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Raw = Float32 | Float64
"""Values as the engine sent them, or means of them."""

LEAST_LENGTH = 1e-12
"""A shorter vector is divided by this, as torch's ``normalize`` does."""


def read_raw_values(pooled: bytes, pooling: Pooling, params: PoolingParams, tokens: Sequence[int]) -> Float32:
    """Reads what the engine sent, little-endian float32: [width], or [tokens, width] if every token has values.

    The values are not copied, unless those of some tokens are left out.
    """
    values = np.frombuffer(pooled, "<f4")
    if not params.wants_token_values(pooling):
        return values
    rows = values.reshape(len(tokens), -1)
    return rows if pooling.step_tag < 0 else rows[np.asarray(tokens) == pooling.step_tag]


def finish_pooled(given: Raw, pooling: Pooling, params: PoolingParams) -> Float32:
    """Returns the embedding [dimensions] or the probabilities [classes] of one prompt, or of each of its tokens."""
    raw = given.astype(np.float64)
    if pooling.task == CLASSIFY:
        raw = (raw - pooling.bias) / pooling.sigma
        return _apply_activation(raw, IDENTITY if params.activates is False else pooling.activation).astype(np.float32)
    size = params.dimensions or pooling.default_dimensions
    cut = raw[..., :size] if size else raw
    on = pooling.normalize if params.activates is None else params.activates
    length = np.maximum(np.linalg.norm(cut, axis=-1, keepdims=True), LEAST_LENGTH)
    return np.asarray(cut / length if on else cut, np.float32)


def compute_pair_score(raw: Raw, pooling: Pooling, params: PoolingParams) -> float:
    """The score of a pair by its class head: of the only class, or of the last label token against the others."""
    value = (raw.astype(np.float64) - pooling.bias) / pooling.sigma
    one = value[-1] if len(value) == 1 else value[-1] - np.logaddexp.reduce(value[:-1])
    if params.activates is False or (pooling.activation == IDENTITY and params.activates is None):
        return float(one)
    return float(_apply_activation(np.asarray([one]), SIGMOID)[0])


def cosine_similarity(one: Raw, other: Raw) -> float:
    """Returns the cosine of the angle between two vectors; 0 if one of them is zero."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


def convert_to_floats(values: Float32) -> list[Json]:
    """Returns Python floats that are equal to the float32 values."""
    found: list[Json] = values.tolist()
    return found


def _apply_activation(raw: Float64, function: str) -> Float64:
    if function == SOFTMAX:
        shifted = np.exp(raw - raw.max(-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(-1, keepdims=True), np.float64)
    if function == SIGMOID:
        return np.asarray(np.exp(-np.logaddexp(0.0, -raw)), np.float64)
    return raw


ValueFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
"""vLLM's names of the formats."""
ByteOrder = Literal["native", "little", "big"]
"""``native`` is little, whatever machine this runs on."""


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


VALUES = 1 << 14
"""Values that are finished and written at once, or those of one row."""


def finish_in_slices(raw: Raw, pooling: Pooling, params: PoolingParams) -> Iterator[Float32]:
    """Yields ``finish_pooled`` of some rows of ``raw`` [rows, width] after the other; a vector [width] is one slice."""
    if raw.ndim == 1:
        yield finish_pooled(raw, pooling, params)
        return
    rows = max(VALUES // max(raw.shape[1], 1), 1)
    for at in range(0, len(raw), rows):
        yield finish_pooled(raw[at : at + rows], pooling, params)


def write_numbers(raw: Raw, pooling: Pooling, params: PoolingParams) -> Iterator[str]:
    """Yields the JSON text of the finished values: an array of numbers, or an array of rows."""
    if raw.ndim == 1:
        yield _to_text(finish_pooled(raw, pooling, params))
        return
    comma = "["
    for some in finish_in_slices(raw, pooling, params):
        yield comma + _to_text(some)[1:-1]
        comma = ","
    yield "[]" if comma == "[" else "]"


def write_base64(
    raw: Raw, pooling: Pooling, params: PoolingParams, dtype: ValueFormat, order: ByteOrder
) -> Iterator[str]:
    """Yields the JSON text of the finished values as base64."""
    yield '"'
    rest = b""
    for some in finish_in_slices(raw, pooling, params):
        rest += encode_values(some, dtype, order)
        whole = len(rest) // 3 * 3
        yield base64.b64encode(rest[:whole]).decode()
        rest = rest[whole:]
    yield base64.b64encode(rest).decode() + '"'


def write_bytes(
    raw: Raw, pooling: Pooling, params: PoolingParams, dtype: ValueFormat, order: ByteOrder
) -> Iterator[bytes]:
    """Yields the finished values as bytes."""
    for some in finish_in_slices(raw, pooling, params):
        yield encode_values(some, dtype, order)


def get_finished_shape(raw: Raw, pooling: Pooling, params: PoolingParams) -> tuple[int, ...]:
    """Returns the shape of ``finish_pooled(raw, ...)``, for which one row is finished."""
    if raw.ndim == 1:
        return finish_pooled(raw, pooling, params).shape
    return len(raw), finish_pooled(raw[:1], pooling, params).shape[-1] if len(raw) else raw.shape[-1]


def _to_text(values: Float32) -> str:
    found: list[Json] = np.asarray(values, np.float64).tolist()
    return to_json(found, inf_nan_mode="null").decode()
