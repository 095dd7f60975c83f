"""A bucket on the CPU: host arrays become padded tensors, and a body is called with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.padding import cells, head, mixed, pad, pool, reset, slot_map, upto_of, windows
from trencadis.backends.cpu.plan import CpuAttn
from trencadis.core.backend import (
    Body,
    HeadTensors,
    Inputs,
    PoolTensors,
    ProgramState,
    ResetTensors,
    Segments,
    TensorsOut,
    TextTensors,
    VisionTensors,
    host_output,
)
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.vision_config import NO_SLOT
from trencadis.core.layout import SINK_ROW, ZERO_BLOCK
from trencadis.core.step import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs

Array = NDArray[Any]


@dataclass(eq=False)
class CpuProgram:
    """``core.backend.Program``. Nothing is captured, so each fill makes new tensors."""

    bucket: Bucket
    body: Body
    state: ProgramState = ProgramState.PLANNED
    bytes: int = 0
    inputs: Any = None

    def compile(self) -> None:
        """Nothing to compile."""
        self.state = max(self.state, ProgramState.COMPILED)

    def rehearse(self) -> None:
        """Costs nothing that could be measured before the first fill."""

    def run(self) -> Any:
        with torch.inference_mode():
            out = self.body(self.inputs)
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def capture(self) -> None:
        """Nothing to capture; the policy says so (``captures``)."""

    def replay(self) -> Any:
        return self.run()

    def release(self) -> int:
        self.inputs = None
        return 0


def tensors(bucket: Bucket, inputs: Inputs, block_size: int, upto: bool = False) -> Any:
    """The stage's tensors at the bucket's size; ``upto``: ``BackendConfig.upto``."""
    match inputs:
        case StepInputs():
            count, rows = bucket.dims if bucket.stage is Stage.PREFILL else (bucket.dims[0], bucket.dims[0])
            return _text(inputs, count, rows, block_size, upto)
        case VisionInputs():
            return _vision(inputs, bucket.dims[0])
        case HeadInputs():
            # A copy, because a program holds its inputs until its next fill.
            return HeadTensors(*map(torch.from_numpy, head(inputs, bucket.dims[0], inputs.masks.copy())))
        case ResetInputs():
            counts = pad(inputs.counts, (bucket.dims[0], inputs.counts.shape[1]), np.int32)
            return ResetTensors(*map(torch.from_numpy, reset(inputs, bucket.dims[0], counts)))
        case PoolInputs():
            return PoolTensors(*map(torch.from_numpy, pool(inputs, bucket.dims[0])))


def _text(x: StepInputs, count: int, rows: int, block_size: int, upto: bool) -> TextTensors:
    """Surplus tokens form the last row: they read ZERO, are stored in SINK, and their hidden state goes to row 0."""
    real, real_rows = len(x.tokens), len(x.context)
    row_start = np.full(rows + 2, real, np.int32)
    row_start[: real_rows + 1] = x.row_start[: real_rows + 1]
    row_start[-1] = count
    attn = CpuAttn(
        row_start=torch.from_numpy(row_start),
        context=_pad(x.context, rows + 1),
        blocks=_blocks(x, rows + 1),
        slot_map=torch.from_numpy(slot_map(x, count, block_size)),
        upto=_pad(upto_of(x), count) if upto else None,
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


def _blocks(x: StepInputs, rows: int) -> Tensor:
    """[rows, width]: block tables, then ZERO blocks; where it can, a view, since a launch has run when it returns."""
    if x.table is not None and rows <= len(x.table):
        return torch.from_numpy(x.table[:rows, : x.blocks.shape[1]])
    return _pad(x.blocks, rows, ZERO_BLOCK)


def _vision(x: VisionInputs, slots: int) -> VisionTensors:
    """Padding windows write to the SINK row."""
    (segment, real), (near, share) = windows(x, slots), mixed(x, slots)
    return VisionTensors(
        pixels=_pad(x.pixels, slots),
        position=_pad(x.position, slots),
        rows=_pad(x.rows, cells(x, slots, NO_SLOT), SINK_ROW, dtype=np.int64),
        segments=Segments(torch.from_numpy(segment), torch.from_numpy(real)),
        near=None if near is None else torch.from_numpy(near),
        share=None if share is None else torch.from_numpy(share),
    )


def _pad(x: Array, size: int, value: float = 0, axis: int = 0, dtype: Any = None) -> Tensor:
    """A copy of ``x``, padded with ``value`` to ``size`` along ``axis``."""
    shape = list(x.shape)
    real, shape[axis] = shape[axis], size
    assert real <= size, f"{real} does not fit a bucket of {size}"
    if real == size:
        return torch.from_numpy(x.astype(dtype or x.dtype))
    out = np.empty(shape, dtype or x.dtype)
    head: tuple[slice, ...] = (slice(None),) * axis
    out[(*head, slice(real))] = x
    out[(*head, slice(real, None))] = value
    return torch.from_numpy(out)


class CpuPending:
    """A result that is already on the host; ``core.backend.Pending``."""

    def __init__(self, out: TensorsOut, rows: int) -> None:
        self._out: Any = host_output(out, [None if t is None else t[:rows].numpy() for t in out])

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._out
