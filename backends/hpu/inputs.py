"""Host arrays of a launch at its bucket's size. Padding is made inert here: it reads ZERO and is stored in SINK.

The arrays have the types of ``core.backend``'s tensors (numpy arrays in their places); ``None`` as inputs gives a launch
of nothing but padding, which is what buffers hold before their first fill.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trencadis.backends.hpu.attention import ContextAttn, DecodeAttn, FreshAttn
from trencadis.core.backend import (
    SINK_BLOCK,
    SINK_ROW,
    ZERO_BLOCK,
    HeadTensors,
    Inputs,
    ResetTensors,
    Segments,
    TextTensors,
    VisionTensors,
)
from trencadis.core.buckets import WINDOW_SLOTS, Bucket, Stage
from trencadis.core.request import MAX_BIAS
from trencadis.core.step import HeadInputs, ResetInputs, StepInputs, VisionInputs

Array = NDArray[Any]
PATCH_VALUES = 1176
"""Values of a patch: 3 colours, 2 frames, 14 x 14 pixels."""


def arrays(bucket: Bucket, inputs: Inputs | None, block_size: int, vocab: int) -> Any:
    """The stage's tensors as numpy arrays."""
    match bucket.stage:
        case Stage.FRESH | Stage.CONTEXT | Stage.DECODE:
            assert inputs is None or isinstance(inputs, StepInputs)
            return text(bucket, inputs, block_size)
        case Stage.VISION:
            assert inputs is None or isinstance(inputs, VisionInputs)
            return _vision(inputs, bucket.dims[0])
        case Stage.SAMPLE:
            assert inputs is None or isinstance(inputs, HeadInputs)
            return _head(inputs, bucket.dims[0], vocab)
        case Stage.RESET:
            assert inputs is None or isinstance(inputs, ResetInputs)
            return _reset(inputs, bucket.dims[0], vocab)
    raise ValueError(f"the hpu backend has no stage {bucket.stage.name}")


def text(bucket: Bucket, x: StepInputs | None, block_size: int) -> Any:
    """FRESH: row r's tokens start at r * T. CONTEXT and DECODE: as they come."""
    count = bucket.dims[0] * bucket.dims[1] if bucket.stage is Stage.FRESH else bucket.dims[0]
    place = _places(bucket, x)

    def put(values: Array | None, dtype: type = np.int32) -> Array:
        out = np.zeros(count, dtype)
        if values is not None:
            out[place] = values
        return out

    positions = np.zeros((3, count), np.int32)
    if x is not None:
        positions[:, place] = x.positions
    return TextTensors(
        tokens=_any(put(x and x.tokens)),
        from_slot=_any(put(x and x.from_slot)),
        positions=_any(positions),
        image_row=_any(put(x and x.image_row)),
        out_row=_any(put(x and x.out_row, np.int64)),
        attn=_any(_attn(bucket, x, count, place, block_size)),
    )


def _places(bucket: Bucket, x: StepInputs | None) -> Array:
    """int64 [n]: where each token of the launch lies in the bucket."""
    if x is None:
        return np.zeros(0, np.int64)
    token = np.arange(len(x.tokens))
    if bucket.stage is not Stage.FRESH:
        return token
    rows, width = bucket.dims
    lengths = np.diff(x.row_start[: len(x.context) + 1])
    assert len(lengths) <= rows and int(lengths.max()) <= width, f"{bucket} is too small"
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row * width + token - x.row_start[row]


def _attn(bucket: Bucket, x: StepInputs | None, count: int, place: Array, size: int) -> Any:
    block = np.full(count, SINK_BLOCK, np.int32)
    offset = (np.arange(count) % size).astype(np.int32)
    own = (ZERO_BLOCK * size + np.arange(count) % size).astype(np.int32)
    if x is not None:
        row = np.repeat(np.arange(len(x.context)), np.diff(x.row_start[: len(x.context) + 1]))
        index = x.context[row] + np.arange(len(x.tokens)) - x.row_start[row]
        block[place], offset[place] = x.blocks[row, index // size], index % size
        own[place] = block[place] * size + offset[place]
    if bucket.stage is Stage.FRESH:
        length = np.ones(bucket.dims[0], np.int32)
        if x is not None:
            length[: len(x.context)] = np.diff(x.row_start[: len(x.context) + 1])
        return FreshAttn(_any(block), _any(offset), _any(own), _any(length))
    listed = np.full(bucket.dims[1], ZERO_BLOCK, np.int32)
    if bucket.stage is Stage.CONTEXT:
        context = np.zeros(1, np.int32)
        if x is not None:
            assert len(x.context) == 1, "CONTEXT takes one row"
            context[0] = x.context[0]
            held = -(-int(context[0]) // size)
            listed[:held] = x.blocks[0, :held]
        return ContextAttn(_any(block), _any(offset), _any(own), _any(listed), _any(context))
    group, usage = np.full(bucket.dims[1], bucket.dims[0], np.int32), np.ones(bucket.dims[1], np.int32)
    if x is not None:
        _list_blocks(x, size, listed, group, usage)
    return DecodeAttn(_any(block), _any(offset), _any(listed), _any(group), _any(usage))


def _list_blocks(x: StepInputs, size: int, listed: Array, group: Array, usage: Array) -> None:
    """The blocks of all rows one after the other; the last of a row is used up to the row's own token."""
    held = x.context // size + 1
    total = int(held.sum())
    assert total <= len(listed), f"{total} blocks do not fit a bucket of {len(listed)}"
    row = np.repeat(np.arange(len(held)), held)
    ends = np.cumsum(held)
    column = np.arange(total) - (ends - held)[row]
    listed[:total], group[:total] = x.blocks[row, column], row
    usage[:total] = size
    usage[ends - 1] = x.context % size + 1


def _vision(x: VisionInputs | None, slots: int) -> Any:
    """Padding windows are pictures of their own with 64 real patches of nothing, written to the SINK row."""
    windows = slots // WINDOW_SLOTS
    real = 0 if x is None else len(x.segment)
    segment = np.arange(windows, dtype=np.int32)
    if x is not None and real:
        segment[:real] = x.segment
        segment[real:] = int(x.segment[-1]) + 1 + np.arange(windows - real)
    return VisionTensors(
        pixels=_pad(x and x.pixels, (slots, PATCH_VALUES), np.uint8),
        position=_pad(x and x.position, (slots, 2), np.int32),
        rows=_pad(x and x.rows, (slots // 4,), np.int64, SINK_ROW),
        segments=Segments(_any(segment), _pad(x and x.count, (windows,), np.int32, WINDOW_SLOTS)),
    )


def _head(x: HeadInputs | None, rows: int, vocab: int) -> Any:
    """Padded rows read hidden row 0, are greedy and belong to slot 0; there is room for a mask of each row."""
    shape = (rows,)
    return HeadTensors(
        hidden_row=_pad(x and x.hidden_row, shape, np.int64),
        slot=_pad(x and x.slot, shape, np.int64),
        temperature=_pad(x and x.temperature, shape),
        top_k=_pad(x and x.top_k, shape, np.int32),
        top_p=_pad(x and x.top_p, shape, value=1),
        min_p=_pad(x and x.min_p, shape),
        presence=_pad(x and x.presence, shape),
        frequency=_pad(x and x.frequency, shape),
        repetition=_pad(x and x.repetition, shape, value=1),
        uniform=_pad(x and x.uniform, shape, value=0.5),
        target=_pad(x and x.target, shape, np.int64, -1),
        mask_row=_pad(x and x.mask_row, shape, np.int64),
        masks=_pad(x and x.masks, (rows + 1, -(-vocab // 8)), np.uint8, 255),
    )


def _reset(x: ResetInputs | None, rows: int, vocab: int) -> Any:
    return ResetTensors(
        slot=_pad(x and x.slot, (rows,), np.int64),
        counts=_pad(x and x.counts, (rows, vocab), np.int32),
        seen=_pad(x and x.seen, (rows, -(-vocab // 8)), np.uint8),
        bias_id=_pad(x and x.bias_id, (rows, MAX_BIAS), np.int64),
        bias_value=_pad(x and x.bias_value, (rows, MAX_BIAS)),
    )


def _pad(x: Array | None, shape: tuple[int, ...], dtype: type = np.float32, value: float = 0) -> Any:
    out = np.full(shape, value, dtype)
    if x is not None:
        assert len(x) <= shape[0], f"{len(x)} rows do not fit a bucket of {shape[0]}"
        out[: len(x)] = x
    return out


def _any(x: Any) -> Any:
    """An array in the place of a tensor."""
    return x
