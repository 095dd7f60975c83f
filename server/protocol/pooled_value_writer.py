"""Writes one prompt's pooled values as JSON in pieces: values of every token are hundreds of megabytes as objects."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
from pydantic_core import to_json

from trencadis.core.checkpoint.pooling_config import Pooling
from trencadis.core.json_types import Json
from trencadis.server.protocol.pooler_output import ByteOrder, Float32, Raw, ValueFormat, encode_values, finish_pooled
from trencadis.server.protocol.pooling_params import PoolingParams

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
