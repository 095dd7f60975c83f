"""Bytes of the memory that a library's attention works in, for the planner: a workspace for each stage. Torch-free."""

from __future__ import annotations

from trencadis.core.buckets import Bucket, InputSizes, Stage

FLASH_ATTN, FLASHINFER = "FLASH_ATTN", "FLASHINFER"

ALIGNMENT = 256
PROCESSORS = 132
"""Of an H100, which the planner assumes if there is no card."""

MOST_FLOATS = 256 << 20
"""Bytes of partial results at most: FlashInfer reserves memory for all tiles of a captured launch. Launches that would
need more do not cut keys."""

SPARE_INTS = 64 << 10
"""Bytes beside the arrays of a plan that are known here."""

SLOTS, TILES = 2, (16, 64, 128)
"""Programs of a processor, and queries of a program, as FlashInfer's scheduler has them."""


def tiles_of(bucket: Bucket, group: int, kv_heads: int, processors: int) -> tuple[int, int]:
    """(programs of a KV head that a captured launch reserves memory for, queries of one).

    As ``PrefillSplitQOKVIndptr`` of flashinfer/attention/scheduler.cuh bounds them.
    """
    tokens, rows = bucket.dims[0], rows_of(bucket)
    longest = max(tokens - rows + 1, 1) if bucket.stage is Stage.DECODE else tokens
    queries = next((t for t in TILES if longest * group <= t), TILES[-1])
    bound = -(-tokens * group // queries) + rows - 1
    return max(SLOTS * processors // max(kv_heads, 1), bound), queries


def rows_of(bucket: Bucket) -> int:
    """Rows that a plan has: a launch of prompts has one more, of its surplus tokens."""
    return bucket.dims[-1] + (bucket.stage is not Stage.DECODE)


def plan_bytes(
    bucket: Bucket, group: int, kv_heads: int, head_dim: int, processors: int = PROCESSORS
) -> tuple[int, int]:
    """(bytes of partial results, bytes of a plan's integers) of FlashInfer; no partial results where keys are whole."""
    tiles, queries = tiles_of(bucket, group, kv_heads, processors)
    floats = 4 * group * kv_heads * tiles * queries * (head_dim + 1)
    ints = 4 * (3 * tiles + rows_of(bucket) + bucket.dims[0]) + tiles + SPARE_INTS
    return (floats if floats <= MOST_FLOATS else 0), align_up(ints)


def align_up(size: int) -> int:
    """``size`` rounded up to where the next tensor begins."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def flash_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """FlashAttention takes what it needs from the pool of a graph."""
    return 0


def infer_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """FlashInfer's workspace beside the inputs of a bucket: partial results, integers of a plan, where rows begin."""
    if bucket.stage not in (Stage.PREFILL, Stage.DECODE):
        return 0
    floats, ints = plan_bytes(bucket, sizes.group, sizes.kv_heads, sizes.head_dim)
    return align_up(floats) + ints + 3 * align_up(4 * (rows_of(bucket) + 1))
