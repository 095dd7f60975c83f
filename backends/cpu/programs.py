"""A bucket on the CPU: host arrays padded inertly into tensors, and a body that is simply called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.plan import CpuAttn
from trencadis.core.backend import (
    SINK_BLOCK,
    SINK_ROW,
    ZERO_BLOCK,
    Body,
    HeadTensors,
    HeadTensorsOut,
    Inputs,
    ResetTensors,
    Segments,
    State,
    TextTensors,
    VisionTensors,
)
from trencadis.core.buckets import WINDOW_SLOTS, Bucket, Stage
from trencadis.core.step import HeadInputs, HeadOutput, ResetInputs, StepInputs, VisionInputs

Array = NDArray[Any]


class CpuProgram:
    """``core.backend.Program``. Nothing is captured, so tensors are made by each fill and own no fixed place."""

    def __init__(self, bucket: Bucket, body: Body) -> None:
        self.bucket, self.body = bucket, body
        self.state = State.PLANNED
        self.bytes = 0
        self.inputs: Any = None

    def compile(self) -> None:
        """Nothing to compile."""
        self.state = max(self.state, State.COMPILED)

    def rehearse(self) -> None:
        """Costs nothing that could be measured before the first fill."""

    def run(self) -> Any:
        with torch.inference_mode():
            out = self.body(self.inputs)
        self.state = max(self.state, State.COMPILED)
        return out

    def capture(self) -> None:
        """Nothing to capture; the policy says so (``captures``)."""

    def replay(self) -> Any:
        return self.run()

    def release(self) -> int:
        self.inputs = None
        return 0


def tensors(bucket: Bucket, inputs: Inputs, block_size: int) -> Any:
    """The stage's tensors at the bucket's size."""
    match inputs:
        case StepInputs():
            count, rows = bucket.dims if bucket.stage is Stage.PREFILL else (bucket.dims[0], bucket.dims[0])
            return _text(inputs, count, rows, block_size)
        case VisionInputs():
            return _vision(inputs, bucket.dims[0])
        case HeadInputs():
            return _head(inputs, bucket.dims[0])
        case ResetInputs():
            return _reset(inputs, bucket.dims[0])


def _text(x: StepInputs, count: int, rows: int, block_size: int) -> TextTensors:
    """Surplus tokens belong to the last row, read ZERO and are stored in SINK; their hidden state goes to row 0."""
    real, real_rows = len(x.tokens), len(x.context)
    row_start = np.full(rows + 2, real, np.int32)
    row_start[: real_rows + 1] = x.row_start[: real_rows + 1]
    row_start[-1] = count
    attn = CpuAttn(
        row_start=torch.from_numpy(row_start),
        context=_pad(x.context, rows + 1),
        blocks=_pad(x.blocks, rows + 1, ZERO_BLOCK),
        slot_map=torch.from_numpy(_slot_map(x, count, block_size)),
    )
    attn.block_size = block_size
    return TextTensors(
        tokens=_pad(x.tokens, count),
        from_slot=_pad(x.from_slot, count),
        positions=_pad(x.positions, count, axis=1),
        image_row=_pad(x.image_row, count),
        out_row=_pad(x.out_row, count, dtype=np.int64),
        attn=attn,
    )


def _slot_map(x: StepInputs, count: int, block_size: int) -> NDArray[np.int64]:
    """int64 [count]: where each token's K and V go."""
    real = len(x.tokens)
    slots = SINK_BLOCK * block_size + np.arange(count, dtype=np.int64) % block_size
    row = np.repeat(np.arange(len(x.context)), np.diff(x.row_start[: len(x.context) + 1]))
    place = x.context[row] + np.arange(real) - x.row_start[row]
    slots[:real] = x.blocks[row, place // block_size].astype(np.int64) * block_size + place % block_size
    return slots


def _vision(x: VisionInputs, slots: int) -> VisionTensors:
    """Padding windows are images of their own with 64 real patches of nothing, written to the SINK row."""
    windows, real = slots // WINDOW_SLOTS, len(x.segment)
    segment = np.zeros(windows, np.int32)
    segment[:real] = x.segment
    segment[real:] = (int(x.segment[-1]) if real else -1) + 1 + np.arange(windows - real)
    return VisionTensors(
        pixels=_pad(x.pixels, slots),
        position=_pad(x.position, slots),
        rows=_pad(x.rows, slots // 4, SINK_ROW, dtype=np.int64),
        segments=Segments(torch.from_numpy(segment), _pad(x.count, windows, WINDOW_SLOTS)),
    )


def _head(x: HeadInputs, rows: int) -> HeadTensors:
    """Padded rows read hidden row 0, are greedy and belong to slot 0."""
    return HeadTensors(
        hidden_row=_pad(x.hidden_row, rows, dtype=np.int64),
        slot=_pad(x.slot, rows, dtype=np.int64),
        temperature=_pad(x.temperature, rows),
        top_k=_pad(x.top_k, rows),
        top_p=_pad(x.top_p, rows, 1),
        min_p=_pad(x.min_p, rows),
        presence=_pad(x.presence, rows),
        frequency=_pad(x.frequency, rows),
        repetition=_pad(x.repetition, rows, 1),
        uniform=_pad(x.uniform, rows, 0.5),
        target=_pad(x.target, rows, -1, dtype=np.int64),
        mask_row=_pad(x.mask_row, rows, dtype=np.int64),
        masks=_pad(x.masks, len(x.masks)),
    )


def _reset(x: ResetInputs, rows: int) -> ResetTensors:
    return ResetTensors(
        slot=_pad(x.slot, rows, dtype=np.int64),
        counts=_pad(x.counts, rows),
        seen=_pad(x.seen, rows),
        bias_id=_pad(x.bias_id, rows, dtype=np.int64),
        bias_value=_pad(x.bias_value, rows),
    )


def _pad(x: Array, size: int, value: float = 0, axis: int = 0, dtype: Any = None) -> Tensor:
    """``x`` in a tensor of ``size`` along ``axis``, the rest filled with ``value``; the host array is not kept."""
    shape = list(x.shape)
    real, shape[axis] = shape[axis], size
    assert real <= size, f"{real} does not fit a bucket of {size}"
    out = np.empty(shape, dtype or x.dtype)
    head: tuple[slice, ...] = (slice(None),) * axis
    out[(*head, slice(real))] = x
    out[(*head, slice(real, None))] = value
    return torch.from_numpy(out)


class Fetched:
    """A result that is already on the host; ``core.backend.Pending``."""

    def __init__(self, out: HeadTensorsOut, rows: int) -> None:
        self._out = HeadOutput(*(None if t is None else t[:rows].numpy() for t in out))  # type: ignore[arg-type]

    def done(self) -> bool:
        return True

    def result(self) -> HeadOutput:
        return self._out
