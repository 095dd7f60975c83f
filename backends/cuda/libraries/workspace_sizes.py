"""Working memory of a library's attention in bytes, for the planner: one workspace per stage. Torch-free."""

from __future__ import annotations

from trencadis.core.buckets import Bucket, InputSizes, Stage, padded_tokens

FLASH_ATTN, FLASHINFER = "FLASH_ATTN", "FLASHINFER"

ALIGNMENT = 256
PROCESSORS = 132
"""Streaming multiprocessors of an H100, assumed by the planner without a card."""

MOST_FLOATS = 256 << 20
"""Maximum bytes of partial results: FlashInfer reserves memory for all tiles of a captured launch. Launches that would
need more do not cut keys.
"""

SPARE_INTS = 64 << 10
"""Bytes added to the arrays of a plan whose sizes are known here."""

SLOTS, TILES = 2, (16, 64, 128)
"""Programs per processor, and choices of queries per program, of FlashInfer's scheduler."""


def tiles_of(bucket: Bucket, group: int, kv_heads: int, processors: int) -> tuple[int, int]:
    """Returns (programs per KV head that a captured launch reserves memory for, queries of one program).

    The bounds are those of ``PrefillSplitQOKVIndptr`` in flashinfer/attention/scheduler.cuh.
    """
    tokens, rows = padded_tokens(bucket), rows_of(bucket)
    longest = max(tokens - rows + 1, 1) if bucket.stage is Stage.DECODE else tokens
    queries = next((t for t in TILES if longest * group <= t), TILES[-1])
    bound = -(-tokens * group // queries) + rows - 1
    return max(SLOTS * processors // max(kv_heads, 1), bound), queries


def rows_of(bucket: Bucket) -> int:
    """Returns the rows of a plan: a launch of prompts has one more, for its surplus tokens."""
    return bucket.dims[-1] + (bucket.stage is not Stage.DECODE)


def plan_bytes(
    bucket: Bucket, group: int, kv_heads: int, head_dim: int, processors: int = PROCESSORS
) -> tuple[int, int]:
    """Returns (bytes of partial results, bytes of a plan's integers) of FlashInfer; no partial results if keys are not
    cut.
    """
    tiles, queries = tiles_of(bucket, group, kv_heads, processors)
    floats = 4 * group * kv_heads * tiles * queries * (head_dim + 1)
    ints = 4 * (3 * tiles + rows_of(bucket) + padded_tokens(bucket)) + tiles + SPARE_INTS
    return (floats if floats <= MOST_FLOATS else 0), align_up(ints)


def align_up(size: int) -> int:
    """Rounds ``size`` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def flash_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns 0: FlashAttention allocates its working memory from the pool of a graph."""
    return 0


def infer_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns the bytes of FlashInfer's workspace in addition to a bucket's inputs: partial results, a plan, row
    starts.
    """
    if bucket.stage not in (Stage.PREFILL, Stage.DECODE, Stage.VERIFY):
        return 0
    floats, ints = plan_bytes(bucket, sizes.group, sizes.kv_heads, sizes.head_dim)
    return align_up(floats) + ints + 3 * align_up(4 * (rows_of(bucket) + 1))
