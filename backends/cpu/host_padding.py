"""Pads the host arrays of a launch to its bucket's size, for every backend; surplus rows hold inert values.

The results are the structures of ``core.device.backend``, with arrays in place of tensors.
"""

from __future__ import annotations

from operator import le
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trencadis.core.buckets import Stage
from trencadis.core.cross_attention_inputs import padding_inputs
from trencadis.core.device.backend import HeadTensors, Inputs, PoolTensors, ResetTensors
from trencadis.core.device.launch_tensors import CrossAttentionTensors, RecurrentRows
from trencadis.core.kv_cache_format import SINK_BLOCK
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.launches.host_inputs import own_positions, padding_vision_inputs
from trencadis.core.request import MAX_BIAS
from trencadis.core.vision_config import NO_SLOT, WINDOW_SLOTS, SlotForm

Array = NDArray[Any]
HEAD: dict[str, tuple[type, float]] = {
    "hidden_row": (np.int64, 0),
    "slot": (np.int64, 0),
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "presence": (np.float32, 0),
    "frequency": (np.float32, 0),
    "repetition": (np.float32, 1),
    "uniform": (np.float32, 0.5),
    "target": (np.int64, -1),
    "mask_row": (np.int64, 0),
}
"""Dtype of each array of a SAMPLE launch, and its value in padded rows."""


def pad(x: Array, shape: tuple[int, ...], dtype: type = np.float32, value: float = 0) -> Any:
    """Returns a new array of ``shape`` with ``x`` at the start of every axis, and ``value`` elsewhere."""
    if x.shape == shape:
        return x.astype(dtype)  # copied, because the caller's array may change
    assert all(map(le, x.shape, shape)), f"{x.shape} does not fit a bucket of {shape}"
    out: Array = np.full(shape, value, dtype)
    out[tuple(map(slice, x.shape))] = x
    return out


def pad_image_adapters(x: VisionInputs, slots: int, cells: int) -> tuple[Array, Array]:
    """Returns the adapter of each slot and of each cell of a bucket, int32 [slots] and [cells]; padding has none."""
    none = np.zeros(0, np.int32)
    found = (none, none) if x.adapter is None or x.cell_adapter is None else (x.adapter, x.cell_adapter)
    return pad(found[0], (slots,), np.int32), pad(found[1], (cells,), np.int32)


def slot_map(x: StepInputs, count: int, block_size: int) -> Array:
    """Returns int64 [count]: the cache slot of each token's K and V; surplus tokens go to SINK."""
    real = len(x.tokens)
    slots = SINK_BLOCK * block_size + np.arange(count, dtype=np.int64) % block_size
    if x.last is not None:  # avoids reading each row's table, which would miss the CPU's cache
        slots[:real] = last_slots(x.last, x.context, block_size)
        return slots
    if real == len(x.context):  # one token per row
        row, position = np.arange(real), x.context
    else:
        row = np.repeat(np.arange(len(x.context)), np.diff(x.row_start[: len(x.context) + 1]))
        position = x.context[row] + np.arange(real) - x.row_start[row]
    slots[:real] = x.blocks[row, position // block_size].astype(np.int64) * block_size + position % block_size
    return slots


def last_slots(last: Array, context: Array, block_size: int) -> Array:
    """Returns int64 [r]: the cache slot of each row's next token, which is in its ``last`` block."""
    slots: Array = last.astype(np.int64) * block_size + context % block_size
    return slots


def visible_ends(x: StepInputs) -> Array:
    """Returns int32 [n]: ``StepInputs.upto``, or each token's own position if no token of the launch sees further."""
    return own_positions(x.row_start, x.context) if x.upto is None else x.upto


def windows(x: VisionInputs, slots: int) -> tuple[Array, Array]:
    """Returns int32 [slots / 64] each: a window's image and number of real patches; surplus windows are images of
    their own.
    """
    count, real = slots // WINDOW_SLOTS, len(x.segment)
    spare = (int(x.segment[-1]) + 1 if real else 0) + np.arange(count - real, dtype=np.int32)
    return np.concatenate([x.segment, spare]), pad(x.count, (count,), np.int32, WINDOW_SLOTS)


def flag_padding_windows(x: VisionInputs, slots: int, always: bool = False) -> Array | None:
    """Returns int32 [slots / 64]: ``Segments.padding_window``; surplus windows are not marked.

    ``always``: also if the inputs have none.
    """
    if x.padding_window is None and not always:
        return None
    made: Array = pad(
        x.padding_window if x.padding_window is not None else np.zeros(0, np.int32), (slots // WINDOW_SLOTS,), np.int32
    )
    return made


def pad_cross_attention(x: StepInputs, count: int, units: int, position: Array | None = None) -> Any:
    """Returns ``CrossAttentionTensors`` of a launch that attends to ``units`` images; None if it attends to none.

    ``position``: index in the bucket of each token.
    """
    if not units:
        return None
    made = (
        padding_inputs(count, units) if x.cross_attention is None else x.cross_attention.padded(count, units, position)
    )
    return CrossAttentionTensors(made.units, made.reach, made.times, made.gate)  # type: ignore[arg-type]


def pad_recurrent(x: StepInputs, rows: int) -> RecurrentRows:
    """Returns ``RecurrentRows`` of a launch of ``rows`` rows; padding rows begin, and write slot 0.

    Inputs without slots of states use those of the sampler, and begin where there is no context.
    """
    real = len(x.context)
    slot, source = (x.slot, np.where(x.context > 0, x.slot, 0)) if x.states is None else x.states
    return RecurrentRows(
        slot=pad(slot, (rows + 1,), np.int64),
        begins=pad(source == 0, (rows + 1,), np.int32, 1),
        source=pad(source, (rows + 1,), np.int64),
        count=pad(np.diff(x.row_start[: real + 1]), (rows + 1,), np.int32),
    )


def cells(x: VisionInputs, slots: int, slot: SlotForm) -> int:
    """Returns the cells of ``slots`` slots, by the form of the inputs, or of ``slot`` for empty inputs."""
    return slots * len(x.rows) // len(x.pixels) if len(x.rows) else slot.cells(slots)


def pad_interpolation(x: VisionInputs, slots: int) -> tuple[Array | None, Array | None]:
    """Returns rows of the table of positions int32 [slots, near], and their shares float32; padding has shares of 0."""
    if x.position_rows is None or x.position_weights is None:
        return None, None
    shape = (slots, x.position_rows.shape[1])
    return pad(x.position_rows, shape, np.int32), pad(x.position_weights, shape)


def head(x: HeadInputs, rows: int, masks: Array, drafts: int | None = None) -> Any:
    """Builds ``HeadTensors``: padded rows read hidden row 0, are greedy and write to slot 0.

    ``drafts``: columns of ``ahead``; 0: it is left out; None: as the inputs have it.
    """
    padded = {name: pad(getattr(x, name), (rows,), *how) for name, how in HEAD.items()}
    if drafts:
        none = np.zeros(0, np.int32)
        padded["place"] = pad(none if x.place is None else x.place, (rows,), np.int64)
        padded["ahead"] = pad(none[:, None] if x.ahead is None else x.ahead, (rows, drafts), np.int64, -1)
    elif drafts is None and x.place is not None and x.ahead is not None:
        padded["place"] = pad(x.place, (rows,), np.int64)
        padded["ahead"] = pad(x.ahead, (rows, x.ahead.shape[1]), np.int64, -1)
    return HeadTensors(masks=masks, **padded)  # type: ignore[arg-type]


def reset(x: ResetInputs, rows: int, counts: Array) -> Any:
    """Builds ``ResetTensors``: padded rows write to slot 0, the sink."""
    return ResetTensors(
        slot=pad(x.slot, (rows,), np.int64),
        counts=counts,  # type: ignore[arg-type]
        prompt_mask=pad(x.prompt_mask, (rows, x.prompt_mask.shape[1]), np.uint8),
        bias_id=pad(x.bias_id, (rows, MAX_BIAS), np.int64),
        bias_value=pad(x.bias_value, (rows, MAX_BIAS)),
    )


def pool(x: PoolInputs, rows: int) -> Any:
    """Builds ``PoolTensors``: padded rows read hidden row 0 and belong to no group."""
    return PoolTensors(hidden_row=pad(x.hidden_row, (rows,), np.int64), group=pad(x.group, (rows,), np.int32))


def empty_inputs(stage: Stage, vocab: int, slot: SlotForm = NO_SLOT) -> Inputs:
    """Returns inputs without rows, for a launch of padding only; ``slot``: the form of a slot of VISION launches."""
    bits = -(-vocab // 8)

    def none(*tail: int, dtype: type = np.int32) -> Array:
        return np.zeros((0, *tail), dtype)

    if stage is Stage.VISION:
        return padding_vision_inputs(slot)
    if stage is Stage.SAMPLE:
        real, ids = none(dtype=np.float32), none()
        masks = np.full((1, bits), 255, np.uint8)
        return HeadInputs(ids, ids, real, ids, real, real, real, real, real, real, ids, ids, masks)
    if stage is Stage.POOL:
        return PoolInputs(none(), none())
    if stage is Stage.RESET:
        pairs = (none(MAX_BIAS), none(MAX_BIAS, dtype=np.float32))
        return ResetInputs(none(), none(vocab), none(bits, dtype=np.uint8), *pairs)
    ids, start = none(), np.zeros(1, np.int32)
    return StepInputs(ids, ids, np.zeros((3, 0), np.int32), ids, ids, start, ids, none(1), ids, ids)
