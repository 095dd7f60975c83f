"""Host arrays of a launch at its bucket's size. Padding is made inert here: it reads block ZERO and is stored in block
SINK.

The arrays have the types of ``device.backend``'s tensors, in numpy. Inputs without rows give a launch
of padding only, which is what buffers hold before their first fill. Fields that arrive packed get their dtype back
from ``convert_fields``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu import host_padding
from trencadis.backends.hpu.attention.attention_input_types import BlockDecodeAttn, ContextAttn, FreshAttn
from trencadis.backends.hpu.shape_policy import padded_start
from trencadis.core.buckets import LORA, Bucket, Stage, drafts_ahead, padded_tokens, verified_width
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device.backend import Inputs, Segments, TextTensors, VisionTensors
from trencadis.core.kv_cache_format import SINK_BLOCK, ZERO_BLOCK
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.launches.host_inputs import token_adapters
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.vision_config import NO_SLOT, SlotForm

HEAD_TYPES = dict.fromkeys(("hidden_row", "slot", "target", "mask_row", "place", "ahead"), torch.int64) | {
    "top_k": torch.int32
}
RESET_TYPES = {"slot": torch.int64, "counts": torch.int32, "bias_id": torch.int64}
"""Dtypes of fields that arrive as packed in compile mode (``launches.input_and_output_copies``)."""


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of nested tuples, in order, without None."""
    if tree is None:
        return []
    if isinstance(tree, tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def rebuild(tree: Any, make: Callable[[Any], Any]) -> Any:
    """Returns ``tree`` with ``make`` applied to its arrays or tensors; tuples and named tuples keep their type."""
    if isinstance(tree, tuple):
        kind: Any = type(tree)
        made = [None if item is None else rebuild(item, make) for item in tree]
        return kind(*made) if hasattr(tree, "_fields") else kind(made)
    assert isinstance(tree, np.ndarray | Tensor)
    return make(tree)


Array = NDArray[Any]


def convert_fields(fields: Any, types: dict[str, torch.dtype]) -> Any:
    """Returns ``fields``, a named tuple of tensors, with those named in ``types`` converted to these dtypes."""
    held = {name: x.to(dtype) for name, dtype in types.items() if (x := getattr(fields, name)) is not None}
    return fields._replace(**held)


class LaunchForm(NamedTuple):
    """Settings that all launches of a model share. With its bucket they determine the inputs of a launch.

    Args:
        vocab: size of the vocabulary, and so of the sampler's masks and counts.
        slot: the form of a slot of VISION.
        windows: True if a layer has a sliding window, so that DECODE needs ``BlockDecodeAttn.rest``.
        upto: True if tokens attend beyond their own position, so that prompts need ``Attn.upto``.
        recurrent: True if layers keep a state for each sequence (``TextTensors.recurrent``).
        shared: True if the start of a text launch is padded to a size that buckets share
        (``shape_policy.padded_start``).
    """

    block_size: int
    vocab: int
    slot: SlotForm = NO_SLOT
    windows: bool = False
    upto: bool = False
    shared: bool = False
    recurrent: bool = False


def arrays(bucket: Bucket, inputs: Inputs | None, form: LaunchForm) -> Any:
    """Returns the stage's tensors as numpy arrays; ``None``: padding only."""
    match inputs if inputs is not None else host_padding.empty_inputs(bucket.stage, form.vocab, form.slot):
        case StepInputs() as x:
            return text(bucket, x, form)
        case VisionInputs() as x:
            return _vision(x, bucket.dims[0], form.slot, bucket.variant == LORA)
        case HeadInputs() as x:
            return host_padding.head(x, bucket.dims[0], _masks(x, bucket, form.vocab), drafts_ahead(bucket))
        case ResetInputs() as x:
            return host_padding.reset(
                x, bucket.dims[0], host_padding.pad(x.counts, (bucket.dims[0], form.vocab), np.int32)
            )
        case PoolInputs() as x:
            return host_padding.pool(x, bucket.dims[0])


def text(bucket: Bucket, x: StepInputs, form: LaunchForm) -> Any:
    """Builds the arrays of a text launch. FRESH and VERIFY: the tokens of row r start at r * T. CONTEXT and DECODE:
    as they come.
    """
    count = padded_tokens(bucket)
    position, start = _token_positions(bucket, x), padded_start(count) if form.shared else count
    rows = 1 if bucket.stage is Stage.CONTEXT else bucket.dims[0]

    def put(values: Array, width: int = start, dtype: type = np.int32) -> Any:
        out: Array = np.zeros((*values.shape[:-1], width), dtype)
        out[..., position] = values
        return out

    return TextTensors(
        tokens=put(x.tokens),
        from_slot=put(x.from_slot),
        positions=put(x.positions),
        image_row=put(x.image_row),
        out_row=put(x.out_row, count, np.int64),
        attn=_any(_attn(bucket, x, count, position, form)),
        cross_attention=host_padding.pad_cross_attention(x, count, planned_units(bucket.variant), position),
        recurrent=host_padding.pad_recurrent(x, rows) if form.recurrent else None,
        adapter=put(token_adapters(x), count) if bucket.variant == LORA else None,
    )


def _token_positions(bucket: Bucket, x: StepInputs) -> Array:
    """Returns int64 [n]: the position of each token of the launch in the bucket."""
    token = np.arange(len(x.tokens))
    if bucket.stage not in (Stage.FRESH, Stage.VERIFY):
        return token
    rows, width = bucket.dims[0], verified_width(bucket) if bucket.stage is Stage.VERIFY else bucket.dims[1]
    lengths = np.diff(x.row_start[: len(x.context) + 1])
    assert len(lengths) <= rows and int(lengths.max(initial=0)) <= width, f"{bucket} is too small"
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row * width + token - x.row_start[row]


def _attn(bucket: Bucket, x: StepInputs, count: int, position: Array, form: LaunchForm) -> Any:
    """Builds the cache slots of tokens and the stage's other attention inputs."""
    size = form.block_size
    slot = SINK_BLOCK * size + np.arange(count) % size
    lengths = np.diff(x.row_start[: len(x.context) + 1])
    row = np.repeat(np.arange(len(x.context)), lengths)
    index = x.context[row] + np.arange(len(x.tokens)) - x.row_start[row]
    slot[position] = x.blocks[row, index // size].astype(np.int64) * size + index % size
    if bucket.stage is Stage.FRESH:
        upto = _upto(x, position, np.tile(np.arange(bucket.dims[1], dtype=np.int32), bucket.dims[0]), form)
        return FreshAttn(_any(slot), host_padding.pad(lengths, (bucket.dims[0],), np.int32, 1), upto)
    listed = np.full(bucket.dims[1], ZERO_BLOCK, np.int32)
    if bucket.stage is Stage.CONTEXT:
        assert len(x.context) <= 1, "CONTEXT takes one row"
        held = -(-int(x.context.sum()) // size)
        listed[:held] = x.blocks[:1, :held].reshape(-1)
        context = host_padding.pad(x.context, (1,), np.int32)
        own = (context + np.arange(count)).astype(np.int32)
        return ContextAttn(_any(slot), _any(listed), context, _upto(x, position, own, form))
    group = np.full(bucket.dims[1], bucket.dims[0], np.int32)
    shape = (bucket.dims[1], verified_width(bucket)) if bucket.stage is Stage.VERIFY else (bucket.dims[1],)
    usage, rest = np.ones(shape, np.int32), np.ones(shape, np.int32)
    if bucket.stage is Stage.VERIFY:
        _list_verified_blocks(x, size, listed, group, usage, rest)
    else:
        _list_blocks(x, size, listed, group, usage, rest)
    return BlockDecodeAttn(_any(slot), _any(listed), _any(group), _any(usage), _any(rest) if form.windows else None)


def _upto(x: StepInputs, position: Array, own: Array, form: LaunchForm) -> Any:
    """Returns ``Attn.upto`` if the model has it, else None. Padding gets its ``own`` position, so that it attends to a
    key.
    """
    if not form.upto:
        return None
    own[position] = host_padding.visible_ends(x)
    return own


def _list_blocks(x: StepInputs, size: int, listed: Array, group: Array, usage: Array, rest: Array) -> None:
    """Lists the blocks of all rows one after the other, in place; the last block of a row is used up to the row's own
    token.
    """
    held = x.context // size + 1
    total = int(held.sum())
    assert total <= len(listed), f"{total} blocks do not fit a bucket of {len(listed)}"
    row = np.repeat(np.arange(len(held)), held)
    ends = np.cumsum(held)
    column = np.arange(total) - (ends - held)[row]
    listed[:total], group[:total] = x.blocks[row, column], row
    usage[:total] = size
    usage[ends - 1] = x.context % size + 1
    rest[:total] = x.context[row] + 1 - column * size


def _list_verified_blocks(x: StepInputs, size: int, listed: Array, group: Array, usage: Array, rest: Array) -> None:
    """Lists the blocks of all rows one after the other, in place, with what each of a row's tokens uses of a block.

    Surplus tokens of a row attend as its last one does.
    """
    lengths = np.diff(x.row_start[: len(x.context) + 1])
    held = (x.context + lengths - 1) // size + 1
    total = int(held.sum())
    assert total <= len(listed), f"{total} blocks do not fit a bucket of {len(listed)}"
    row = np.repeat(np.arange(len(held)), held)
    column = np.arange(total) - (np.cumsum(held) - held)[row]
    listed[:total], group[:total] = x.blocks[row, column], row
    place = np.minimum(np.arange(usage.shape[1])[None], lengths[row][:, None] - 1)
    rest[:total] = (x.context[row] + 1 - column * size)[:, None] + place
    usage[:total] = np.clip(rest[:total], 0, size)


def _vision(x: VisionInputs, slots: int, slot: SlotForm, adapters: bool) -> Any:
    """Builds the arrays of a VISION launch. Padding windows write to the SINK row."""
    (segment, real), (near, share) = host_padding.windows(x, slots), host_padding.pad_interpolation(x, slots)
    count = host_padding.cells(x, slots, slot)
    adapter, cell_adapter = host_padding.pad_image_adapters(x, slots, count) if adapters else (None, None)
    return VisionTensors(
        pixels=host_padding.pad(x.pixels, (slots, x.pixels.shape[1]), np.uint8),
        position=host_padding.pad(x.position, (slots, 2), np.int32),
        rows=host_padding.pad(x.rows, (count,), np.int64, SINK_ROW),
        segments=Segments(
            _any(segment), _any(real), _any(host_padding.flag_padding_windows(x, slots, slot.padding_windows))
        ),
        position_rows=_any(near),
        position_weights=_any(share),
        adapter=_any(adapter),
        cell_adapter=_any(cell_adapter),
    )


def _masks(x: HeadInputs, bucket: Bucket, vocab: int) -> Array:
    """Returns the mask of each row and one that allows everything; the greedy variant has only the latter."""
    rows = 1 if bucket.variant == "greedy" else bucket.dims[0] + 1
    masks: Array = host_padding.pad(x.masks, (rows, -(-vocab // 8)), np.uint8, 255)
    return masks


def _any(x: Any) -> Any:
    """Returns an array, typed as the tensor that it stands for."""
    return x
