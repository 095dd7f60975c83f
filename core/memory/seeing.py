"""What attention to pictures holds in a text launch, beside attention to tokens. Pure; in bytes."""

from __future__ import annotations

from trencadis.core.buckets import Bucket, padded_tokens
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.shapes.seen import planned_units

SCORES = 1 << 25
"""Scores that are held at a time (``backends.cpu.reference``)."""


def seen_layers(model: ModelConfig, bucket: Bucket, seeing: bool = True) -> int:
    """Layers that see pictures in a launch that does; not ``seeing``: those that a launch without pictures skips."""
    return len(model.text.cross) if bool(planned_units(bucket.variant)) is seeing else 0


def seen_keeps(model: ModelConfig, bucket: Bucket, itemsize: int) -> int:
    """What crosses a graph's cuts around sums of ranks, beside that of other layers: gates, and what they multiply."""
    return padded_tokens(bucket) * seen_layers(model, bucket) * (2 * model.text.hidden + 2) * itemsize


def seen_rows(model: ModelConfig, bucket: Bucket) -> int:
    """The numbers of the arena's rows, which all layers of a launch read."""
    return 8 * planned_units(bucket.variant) * (model.vision.unit if model.vision is not None else 0)


def seen_bytes(model: ModelConfig, bucket: Bucket, itemsize: int, heads: int, kv_heads: int) -> int:
    """Keys and values gathered, turned once for the products, and the scores of a tile of queries.

    ``heads``, ``kv_heads``: of one device.
    """
    units = planned_units(bucket.variant)
    if not units or model.vision is None:
        return 0
    keys, d = units * model.vision.unit, model.text.head_dim
    scores = min(max(SCORES, heads * keys), padded_tokens(bucket) * heads * keys)
    return 4 * keys * kv_heads * d * itemsize + scores * (12 + itemsize)
