"""Bytes of a bucket's static inputs, as ``buffers.Buffers`` lays them out. Pure Python, for the planner."""

from __future__ import annotations

from collections.abc import Iterator

from trencadis.core.buckets import Bucket, InputSizes, Stage
from trencadis.core.request import MAX_BIAS

ALIGNMENT = 256
"""Bytes; each tensor begins at a multiple, so that kernels see the same alignment in every bucket."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100, which the planner assumes if there is no card."""

LEAST = 256
"""Fewest keys of a piece: with fewer, combining partial results costs more than another processor saves."""

WAVES = 4
"""Pieces per processor that a launch may have in addition to one per row."""


def aligned(size: int) -> int:
    """``size`` rounded up to where the next tensor begins."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def capacity(rows: int, processors: int, kv_heads: int, longest: int) -> int:
    """Most pieces that a launch of ``rows`` rows is cut into; ``longest``: keys of the longest possible row."""
    each = -(-longest // LEAST)
    return min(rows + max(WAVES * processors // kv_heads, 1), rows * each)


def input_bytes(bucket: Bucket, sizes: InputSizes, processors: int = PROCESSORS, invariant: bool = False) -> int:
    """Bytes of all of a bucket's input tensors (``inputs.arrays`` makes them)."""
    return sum(map(aligned, _tensors(bucket, sizes, processors, invariant)))


def _tensors(bucket: Bucket, sizes: InputSizes, processors: int, invariant: bool) -> Iterator[int]:
    """Bytes of each tensor."""
    count, bits = bucket.dims[0], -(-sizes.vocab // 8)
    match bucket.stage:
        case Stage.PREFILL | Stage.DECODE if bucket.stage is Stage.PREFILL or invariant:
            rows = bucket.dims[-1]
            yield from _text(count, rows, sizes)
            yield from (4 * (rows + 1),) * 2
            if sizes.upto:
                yield 4 * count
        case Stage.DECODE:
            longest = sizes.row_blocks * sizes.block_size
            pieces = capacity(count, processors, sizes.kv_heads, longest)
            yield from _text(count, count, sizes)
            yield from (4 * (count + 1), *(4 * pieces,) * 3)
        case Stage.VISION:
            windows = count // 64
            yield from (sizes.slot.values * count, 4 * 2 * count, 8 * (count // sizes.slot.cell), *(4 * windows,) * 4)
            yield from (4 * sizes.slot.near * count,) * 2
        case Stage.SAMPLE:
            yield from (*(8 * count,) * 4, *(4 * count,) * 8)
            yield bits * (1 if bucket.variant == "greedy" else count + 1)
        case Stage.RESET:
            yield from (8 * count, 4 * sizes.vocab * count, bits * count, 8 * MAX_BIAS * count, 4 * MAX_BIAS * count)
        case Stage.POOL:
            yield from (8 * count, 4 * count)
        case _:
            raise ValueError(f"{bucket} is no stage of this device")


def _text(tokens: int, rows: int, sizes: InputSizes) -> Iterator[int]:
    """Bytes of ids, slots, positions, image rows, out rows; row starts, contexts, blocks, slot map, block starts."""
    yield from (4 * tokens, 4 * tokens, 4 * 3 * tokens, 4 * tokens, 8 * tokens)
    yield from (4 * (rows + 2), 4 * (rows + 1), 4 * rows * sizes.row_blocks, 8 * tokens, 4 * (rows + 2))
