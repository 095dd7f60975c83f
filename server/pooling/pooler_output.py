"""Turns pooled values into embeddings, probabilities and scores. Uses numpy; values are computed in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trencadis.core.checkpoint.pooling_config import CLASSIFY, IDENTITY, SIGMOID, SOFTMAX, Pooling
from trencadis.server.pooling.pooling_params import PoolingParams

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


def convert_to_floats(values: Float32) -> list[Any]:
    """Returns Python floats that are equal to the float32 values."""
    found: list[Any] = values.tolist()
    return found


def _apply_activation(raw: Float64, function: str) -> Float64:
    if function == SOFTMAX:
        shifted = np.exp(raw - raw.max(-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(-1, keepdims=True), np.float64)
    if function == SIGMOID:
        return np.asarray(np.exp(-np.logaddexp(0.0, -raw)), np.float64)
    return raw
