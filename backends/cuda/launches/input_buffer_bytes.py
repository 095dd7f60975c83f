"""Bytes of a bucket's static inputs, as ``input_buffers.InputBuffers`` lays them out. Pure Python, for the planner."""

from __future__ import annotations

from collections.abc import Iterator

from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import cross_attention_lanes
from trencadis.backends.cuda.launches.work_item_capacity import cross_attention_capacity, item_capacity
from trencadis.core.buckets import LORA, Bucket, Stage, drafts_ahead, padded_tokens
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.request import MAX_BIAS

ALIGNMENT = 256
"""Each tensor begins at a multiple of this many bytes, so that kernels see the same alignment in every bucket."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100, assumed by the planner without a card."""


def align_up(size: int) -> int:
    """Rounds ``size`` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def cross_attention_bytes(bucket: Bucket, sizes: InputSizes, processors: int = PROCESSORS) -> int:
    """Returns the bytes of partial results of cross-attention, which a text launch holds at a time."""
    if not planned_units(bucket.variant):
        return 0
    capacity = cross_attention_capacity(
        bucket, sizes.group, processors, sizes.kv_heads, sizes.slot.cross_attention_rows
    )
    lanes = cross_attention_lanes(bucket.stage is Stage.DECODE)
    return 4 * capacity.parts * sizes.kv_heads * lanes * (sizes.head_dim + 2)


def input_bytes(bucket: Bucket, sizes: InputSizes, processors: int = PROCESSORS, invariant: bool = False) -> int:
    """Returns the bytes of all of a bucket's input tensors, which ``cuda_inputs.arrays`` builds."""
    return sum(map(align_up, _tensors(bucket, sizes, processors, invariant)))


def _tensors(bucket: Bucket, sizes: InputSizes, processors: int, invariant: bool) -> Iterator[int]:
    """Yields the bytes of each tensor."""
    count, bits = bucket.dims[0], -(-sizes.vocab // 8)
    match bucket.stage:
        case Stage.PREFILL | Stage.DECODE | Stage.VERIFY:
            count = padded_tokens(bucket)
            longest = sizes.row_blocks * sizes.block_size
            capacity = item_capacity(bucket, sizes.group, processors, sizes.kv_heads, longest, invariant)
            yield from _text(count, bucket.dims[-1], sizes)
            yield from (*(4 * capacity.items,) * 5, *(4 * capacity.joins,) * 2, 4 * (capacity.joins + 1))
            if sizes.recurrent:
                yield from (*(8 * (bucket.dims[-1] + 1),) * 2, *(4 * (bucket.dims[-1] + 1),) * 2)
            if sizes.upto and (bucket.stage is not Stage.DECODE or invariant):
                yield 4 * count
            if bucket.variant == LORA:
                yield 4 * count
            if units := planned_units(bucket.variant):
                cross_attention = cross_attention_capacity(
                    bucket, sizes.group, processors, sizes.kv_heads, sizes.slot.cross_attention_rows
                )
                yield from (*(4 * units,) * 2, *(4 * count * units,) * 2, 4 * count, *(4 * cross_attention.items,) * 5)
                yield from (4 * cross_attention.joins, 4 * (cross_attention.joins + 1))
        case Stage.VISION:
            windows = count // 64
            yield from (sizes.slot.values * count, 4 * 2 * count, 8 * sizes.slot.cells(count), *(4 * windows,) * 6)
            yield from (4 * sizes.slot.position_neighbours * count,) * 2
            yield from (4 * windows,) * (4 if sizes.slot.padding_windows else 0)
            if bucket.variant == LORA:
                yield from (4 * count, 4 * sizes.slot.cells(count))
        case Stage.SAMPLE:
            yield from (*(8 * count,) * 4, *(4 * count,) * 8)
            if ahead := drafts_ahead(bucket):
                yield from (8 * count, 8 * count * ahead)
            yield bits * (1 if bucket.variant == "greedy" else count + 1)
        case Stage.RESET:
            yield from (8 * count, 4 * sizes.vocab * count, bits * count, 8 * MAX_BIAS * count, 4 * MAX_BIAS * count)
        case Stage.POOL:
            yield from (8 * count, 4 * count)
        case _:
            raise ValueError(f"{bucket} is no stage of this device")


def _text(tokens: int, rows: int, sizes: InputSizes) -> Iterator[int]:
    """Yields the bytes of ids, slots, positions, image rows, out rows; row starts, contexts, blocks, slot map, block
    starts.
    """
    yield from (4 * tokens, 4 * tokens, 4 * 3 * tokens, 4 * tokens, 8 * tokens)
    yield from (4 * (rows + 2), 4 * (rows + 1), 4 * rows * sizes.row_blocks, 8 * tokens, 4 * (rows + 2))
