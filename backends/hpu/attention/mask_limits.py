"""Limits of the fused kernel, checked from a bucket's shape before anything runs: beyond them a card returns NaN."""

from __future__ import annotations

from trencadis.backends.hpu.attention.context_prefill import CAUSAL_STEP
from trencadis.backends.hpu.attention.softmax import MASK_BYTES, MASK_ITEM, QUERY_TILE, mask_rows
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.errors import StartupError


def largest_mask(bucket: Bucket, block_size: int, slice_tokens: int) -> int:
    """Returns the bytes of a head's largest mask in one call of the fused kernel; FRESH and DECODE have none."""
    if bucket.stage is Stage.VISION:
        slots = bucket.dims[0]
        return MASK_ITEM * min(mask_rows(slots), slots) * slots
    if bucket.stage is not Stage.CONTEXT:
        return 0
    tokens, stored = bucket.dims[0], bucket.dims[1] * block_size
    if tokens <= QUERY_TILE and stored <= slice_tokens:
        return MASK_ITEM * tokens * (stored + tokens)
    return MASK_ITEM * max(tokens % CAUSAL_STEP * tokens, min(stored, slice_tokens))


def check_bucket(bucket: Bucket, block_size: int, slice_tokens: int) -> None:
    """Raises StartupError for a bucket whose launches would exceed ``MASK_BYTES``."""
    count = largest_mask(bucket, block_size, slice_tokens)
    if count > MASK_BYTES:
        raise StartupError(
            f"bucket {bucket} needs an attention mask of {count} bytes a head and Gaudi's kernel takes {MASK_BYTES}: "
            "lower --max-num-batched-tokens or max_pixels of --mm-processor-kwargs."
        )
