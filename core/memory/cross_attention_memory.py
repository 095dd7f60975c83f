"""Memory of cross-attention to images in a text launch, in addition to self-attention. Pure; in bytes."""

from __future__ import annotations

from trencadis.core.buckets import Bucket, padded_tokens
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.shapes.cross_attention_inputs import planned_units

SCORES = 1 << 25
"""Number of scores that are held at the same time (``backends.cpu.reference_ops``)."""


def cross_attention_layer_count(model: ModelConfig, bucket: Bucket, seeing: bool = True) -> int:
    """Returns the number of cross-attention layers that run in a launch with images (``seeing``).

    Not ``seeing``: the number of those that a launch without images skips.
    """
    return len(model.text.cross_attention_layers) if bool(planned_units(bucket.variant)) is seeing else 0


def cross_attention_kept_bytes(model: ModelConfig, bucket: Bucket, itemsize: int) -> int:
    """Returns the bytes that cross-attention adds at a graph's cuts around all-reduces: gates and their factors."""
    return padded_tokens(bucket) * cross_attention_layer_count(model, bucket) * (2 * model.text.hidden + 2) * itemsize


def cross_attention_row_bytes(model: ModelConfig, bucket: Bucket) -> int:
    """Returns the bytes of the arena row numbers, which all layers of a launch share."""
    return 8 * planned_units(bucket.variant) * (model.vision.cross_attention_rows if model.vision is not None else 0)


def cross_attention_work_bytes(model: ModelConfig, bucket: Bucket, itemsize: int, heads: int, kv_heads: int) -> int:
    """Returns the bytes of gathered keys and values, with a transposed copy, and of the scores of a tile of queries.

    ``heads`` and ``kv_heads`` are those of one device.
    """
    units = planned_units(bucket.variant)
    if not units or model.vision is None:
        return 0
    keys, d = units * model.vision.cross_attention_rows, model.text.head_dim
    scores = min(max(SCORES, heads * keys), padded_tokens(bucket) * heads * keys)
    return 4 * keys * kv_heads * d * itemsize + scores * (12 + itemsize)
