"""Host arrays of a launch at its bucket's size. Padding is made inert here: it reads nothing and is stored in block
SINK.

The arrays stand in place of ``device.backend``'s tensors. Inputs without rows give a launch of padding only, which is
what buffers hold before their first fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.backends.cpu import host_padding
from trencadis.backends.cuda.kernels.attention_metadata import (
    CrossAttentionItems,
    CudaSegments,
    ItemAttn,
    SingleAttn,
    SingleCrossAttention,
)
from trencadis.backends.cuda.launches.attention_work_items import LaunchPlans, first_rows_of
from trencadis.backends.cuda.launches.bucket_capacity import (
    ItemCapacity,
    block_tokens,
    cross_attention_block_tokens,
    cross_attention_capacity,
    item_capacity,
)
from trencadis.core.buckets import LORA, Bucket, Stage, drafts_ahead, padded_tokens
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device.backend import Inputs, TextTensors, VisionTensors
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.launches.host_inputs import token_adapters
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.vision_config import NO_SLOT, WINDOW_SLOTS, SlotForm

Array = NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    """Everything besides its bucket that determines the sizes of a launch's tensors.

    Args:
        row_blocks: KV blocks of the longest possible row.
        kv_heads: KV heads of one rank; determines how finely keys are cut.
        processors: streaming multiprocessors of the device.
        invariant: DECODE attends as PREFILL does, and cuts are at fixed keys (``--batch-invariant``).
        upto: PREFILL launches have ``Attn.upto``.
        group: query heads per KV head.
        recurrent: text launches have ``TextTensors.recurrent``.
    """

    block_size: int
    row_blocks: int
    vocab: int
    kv_heads: int = 4
    processors: int = 132
    invariant: bool = False
    slot: SlotForm = NO_SLOT
    upto: bool = False
    group: int = 8
    recurrent: bool = False

    def item_capacity(self, bucket: Bucket) -> ItemCapacity:
        """Returns the capacity for work items of a text launch."""
        longest = self.row_blocks * self.block_size
        return item_capacity(bucket, self.group, self.processors, self.kv_heads, longest, self.invariant)

    def cross_attention_capacity(self, bucket: Bucket) -> ItemCapacity:
        """Returns the capacity for work items of cross-attention of a text launch."""
        return cross_attention_capacity(
            bucket, self.group, self.processors, self.kv_heads, self.slot.cross_attention_rows
        )


def arrays(bucket: Bucket, inputs: Inputs | None, sizes: Sizes, plans: LaunchPlans | None = None) -> Any:
    """Returns the stage's tensors as numpy arrays; ``None``: padding only. The one of ``growing_tensor`` is not padded.

    Args:
        plans: the bucket's cached plans; without them every launch is planned anew.
    """
    match inputs if inputs is not None else host_padding.empty_inputs(bucket.stage, sizes.vocab, sizes.slot):
        case StepInputs() as x:
            return text(bucket, x, sizes, plans or LaunchPlans())
        case VisionInputs() as x:
            return _vision(x, bucket.dims[0], sizes.slot, bucket.variant == LORA)
        case HeadInputs() as x:
            return host_padding.head(x, bucket.dims[0], x.masks, drafts_ahead(bucket))
        case ResetInputs() as x:
            return host_padding.reset(x, bucket.dims[0], x.counts)
        case PoolInputs() as x:
            return host_padding.pool(x, bucket.dims[0])


def growing_tensor(bucket: Bucket, sizes: Sizes) -> tuple[str, tuple[int, ...]]:
    """Returns the name of the one tensor of a stage whose unused end is not copied, and its shape in the bucket.

    The end keeps values of an earlier launch: ids that no row points to, pixels of padding slots, masks of no row.
    """
    size = bucket.dims[0]
    match bucket.stage:
        case Stage.PREFILL:
            return "blocks", (bucket.dims[1] * sizes.row_blocks,)
        case Stage.DECODE | Stage.VERIFY:
            return "blocks", (size * sizes.row_blocks,)
        case Stage.VISION:
            return "pixels", (size, sizes.slot.values)
        case Stage.SAMPLE:
            rows = 1 if bucket.variant == "greedy" else size + 1
            return "masks", (rows, -(-sizes.vocab // 8))
        case Stage.POOL:
            return "group", (size,)
        case _:
            return "counts", (size, sizes.vocab)


def text(bucket: Bucket, x: StepInputs, sizes: Sizes, plans: LaunchPlans) -> Any:
    """Builds the arrays of PREFILL (tokens, rows), DECODE (rows) and VERIFY (rows); surplus tokens are stored in SINK
    and write hidden row 0.
    """
    count = padded_tokens(bucket)
    return TextTensors(
        tokens=host_padding.pad(x.tokens, (count,), np.int32),
        from_slot=host_padding.pad(x.from_slot, (count,), np.int32),
        positions=_columns(x.positions, count),
        image_row=host_padding.pad(x.image_row, (count,), np.int32),
        out_row=host_padding.pad(x.out_row, (count,), np.int64),
        attn=_attn(bucket, x, sizes, plans),
        cross_attention=_make_cross_attention(bucket, x, sizes, plans),
        recurrent=host_padding.pad_recurrent(x, bucket.dims[-1]) if sizes.recurrent else None,
        adapter=host_padding.pad(token_adapters(x), (count,), np.int32) if bucket.variant == LORA else None,
    )


def _attn(bucket: Bucket, x: StepInputs, sizes: Sizes, plans: LaunchPlans) -> Any:
    count, rows, capacity = padded_tokens(bucket), bucket.dims[-1], sizes.item_capacity(bucket)
    row_start, context, counts, blocks, block_start = _rows(x, count, rows, sizes.block_size)
    stored, surplus = host_padding.slot_map(x, count, sizes.block_size), count - len(x.tokens)
    lists = (row_start, context, blocks, stored, block_start)
    if bucket.stage is Stage.DECODE and not sizes.invariant:
        assert len(x.tokens) == len(x.context), "DECODE takes one token a row"
        return SingleAttn(*_any(*lists, *plans.single(x.context, surplus, capacity)))
    upto = host_padding.visible_ends(x) if sizes.upto else None
    each = block_tokens(bucket, sizes.group, sizes.invariant)
    planned = plans.several(x.context, counts, surplus, each, capacity, upto)
    padded = None if upto is None else host_padding.pad(upto, (count,), np.int32)
    return ItemAttn(*_any(*lists, *planned, padded))


def _make_cross_attention(bucket: Bucket, x: StepInputs, sizes: Sizes, plans: LaunchPlans) -> Any:
    made: Any = host_padding.pad_cross_attention(x, bucket.dims[0], planned_units(bucket.variant))
    if made is None:
        return None
    each, rows = (
        cross_attention_block_tokens(bucket, sizes.group),
        first_rows_of(made.units, sizes.slot.cross_attention_rows),
    )
    kind = SingleCrossAttention if bucket.stage is Stage.DECODE else CrossAttentionItems
    return kind(*made, *_any(rows, *plans.cross_attention.of(made.reach, each, sizes.cross_attention_capacity(bucket))))


class _RowArrays(NamedTuple):
    """The rows of a launch: ``counts`` are the tokens of each real row, ``blocks`` the block ids of all rows in order,
    ``block_start`` the start of each row's ids.
    """

    row_start: Array
    context: Array
    counts: Array
    blocks: Array
    block_start: Array


def _rows(x: StepInputs, count: int, rows: int, block_size: int) -> _RowArrays:
    """Builds the arrays of ``rows`` rows, padded, for a launch of ``count`` tokens."""
    real = len(x.context)
    assert real <= rows, f"{real} rows do not fit {rows}"
    row_start = np.full(rows + 2, len(x.tokens), np.int32)
    row_start[: real + 1] = x.row_start[: real + 1]
    row_start[-1] = count
    counts = np.diff(x.row_start[: real + 1])
    held = -(-(x.context + counts) // block_size)
    block_start = np.full(rows + 2, int(held.sum()), np.int32)
    block_start[0] = 0
    np.cumsum(held, out=block_start[1 : real + 1])
    blocks = x.blocks[np.arange(x.blocks.shape[1]) < held[:, None]]
    return _RowArrays(row_start, host_padding.pad(x.context, (rows + 1,), np.int32), counts, blocks, block_start)


def _vision(x: VisionInputs, slots: int, slot: SlotForm, adapters: bool) -> Any:
    """Builds the arrays of a VISION launch. Padding windows write to the SINK row."""
    near, share = host_padding.pad_interpolation(x, slots)
    count = host_padding.cells(x, slots, slot)
    adapter, cell_adapter = host_padding.pad_image_adapters(x, slots, count) if adapters else (None, None)
    return VisionTensors(
        pixels=_any(x.pixels)[0],
        position=host_padding.pad(x.position, (slots, 2), np.int32),
        rows=host_padding.pad(x.rows, (count,), np.int64, SINK_ROW),
        segments=_any(CudaSegments(*_any(*_segments(x, slots, slot))))[0],
        position_rows=_any(near)[0],
        position_weights=_any(share)[0],
        adapter=_any(adapter)[0],
        cell_adapter=_any(cell_adapter)[0],
    )


def _segments(x: VisionInputs, slots: int, slot: SlotForm) -> tuple[Array, ...]:
    """Returns the arrays of ``CudaSegments``."""
    segment, real = host_padding.windows(x, slots)
    made, padding_window = segments(segment, real), host_padding.flag_padding_windows(x, slots, slot.padding_windows)
    if padding_window is None:
        return made
    solid = np.where(padding_window > 0, 0, real)
    _, solid, _, _, whole, order = segments(segment, solid)
    return (*made, padding_window, solid, whole, order)


def segments(segment: Array, real: Array) -> tuple[Array, ...]:
    """Computes the arrays of ``CudaSegments`` from the image of each window (ascending) and its number of real
    patches.
    """
    first = np.searchsorted(segment, segment, side="left").astype(np.int32)
    stop = np.searchsorted(segment, segment, side="right").astype(np.int32)
    full = real == WINDOW_SLOTS
    before = np.concatenate([[0], full.cumsum()])
    whole = (first + before[stop] - before[first]).astype(np.int32)
    order = np.lexsort((~full, segment)).astype(np.int32)
    return segment.astype(np.int32), real.astype(np.int32), first, stop, whole, order


def _columns(x: Array, count: int) -> Any:
    out = np.zeros((x.shape[0], count), np.int32)
    out[:, : x.shape[1]] = x
    return out


def _any(*x: Any) -> tuple[Any, ...]:
    """Returns arrays, typed as the tensors that they stand for."""
    return x
