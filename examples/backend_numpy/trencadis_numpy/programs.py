"""A bucket on numpy: ``fill`` makes padded, inert input tensors, and a body is called with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import (
    Attn,
    BackendConfig,
    Body,
    HeadTensors,
    Inputs,
    PoolTensors,
    ProgramState,
    ResetTensors,
    Segments,
    TextTensors,
    VisionTensors,
)
from trencadis.core.kv_cache_format import SINK_BLOCK, ZERO_BLOCK
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.vision_config import WINDOW_SLOTS

Array = NDArray[Any]


class NumpyProgram:
    """``trencadis.core.device.backend.Program``. There are no graphs: ``capture`` leaves it COMPILED."""

    def __init__(self, bucket: Bucket, body: Body, cfg: BackendConfig) -> None:
        self.bucket, self.body, self.cfg = bucket, body, cfg
        self.state = ProgramState.PLANNED
        self.bytes = 0
        self.inputs: Any = None

    def fill(self, x: Inputs) -> None:
        """Copies ``x`` into new tensors of the bucket's size."""
        match x:
            case StepInputs():
                made: Any = text(self.bucket, x, self.cfg.block_size)
            case VisionInputs():
                made = vision(x, self.bucket.dims[0])
            case HeadInputs():
                made = head(x, self.bucket.dims[0])
            case ResetInputs():
                made = reset(x, self.bucket.dims[0])
            case PoolInputs():
                made = pool(x, self.bucket.dims[0])
        self.inputs = made

    def compile(self) -> None:
        self.state = max(self.state, ProgramState.COMPILED)

    def rehearse(self) -> None:
        """There is nothing to measure before the first fill."""

    def run(self) -> Any:
        with torch.inference_mode():
            out = self.body(self.inputs)
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def capture(self) -> None:
        """numpy has no graphs; the policy says so (``captures`` is False)."""

    def replay(self) -> Any:
        return self.run()

    def release(self) -> int:
        return 0


def text(bucket: Bucket, x: StepInputs, size: int) -> TextTensors:
    """Surplus tokens form a last row of their own: they read ZERO, are stored in SINK and write hidden row 0."""
    count = bucket.dims[0]
    rows = bucket.dims[1] if bucket.stage is Stage.PREFILL else count
    n, r = len(x.tokens), len(x.context)
    starts = np.full(rows + 2, n, np.int32)
    starts[: r + 1] = x.row_start[: r + 1]
    starts[-1] = count
    row = np.repeat(np.arange(r), np.diff(x.row_start[: r + 1]))
    place = x.context[row] + np.arange(n) - x.row_start[row]
    slots = SINK_BLOCK * size + np.arange(count, dtype=np.int64) % size
    slots[:n] = x.blocks[row, place // size].astype(np.int64) * size + place % size
    return TextTensors(
        tokens=padded(x.tokens, count),
        from_slot=padded(x.from_slot, count),
        positions=padded(x.positions.T, count).t(),
        image_row=padded(x.image_row, count),
        out_row=padded(x.out_row, count, kind=np.int64),
        attn=Attn(
            row_start=torch.from_numpy(starts),
            context=padded(x.context, rows + 1),
            blocks=padded(x.blocks, rows + 1, ZERO_BLOCK),
            slot_map=torch.from_numpy(slots),
        ),
    )


def vision(x: VisionInputs, slots: int) -> VisionTensors:
    """Surplus windows are images of their own, whose tokens go to the arena's SINK."""
    windows, real = slots // WINDOW_SLOTS, len(x.segment)
    segment = np.arange(windows, dtype=np.int32) + (int(x.segment[-1]) + 1 - real if real else 0)
    segment[:real] = x.segment
    return VisionTensors(
        pixels=padded(x.pixels, slots),
        position=padded(x.position, slots),
        rows=padded(x.rows, slots * len(x.rows) // len(x.pixels), SINK_ROW, np.int64),
        segments=Segments(torch.from_numpy(segment), padded(x.count, windows, WINDOW_SLOTS)),
    )


def head(x: HeadInputs, rows: int) -> HeadTensors:
    """Padded rows write to slot 0 and take the argmax of hidden row 0."""
    neutral = {"top_p": 1, "repetition": 1, "uniform": 0.5, "target": -1}
    wide = ("hidden_row", "slot", "target", "mask_row")
    fields = [f for f in HeadTensors._fields if f != "masks" and getattr(x, f) is not None]  # None: no drafts
    made = {f: padded(getattr(x, f), rows, neutral.get(f, 0), np.int64 if f in wide else None) for f in fields}
    return HeadTensors(**made, masks=torch.from_numpy(x.masks.copy()))


def reset(x: ResetInputs, rows: int) -> ResetTensors:
    """Padded rows reset slot 0."""
    kinds = {"slot": np.int64, "bias_id": np.int64}
    return ResetTensors(*(padded(getattr(x, f), rows, 0, kinds.get(f)) for f in ResetTensors._fields))


def pool(x: PoolInputs, rows: int) -> PoolTensors:
    """Padded rows read hidden row 0 and belong to no group."""
    return PoolTensors(padded(x.hidden_row, rows, kind=np.int64), padded(x.group, rows))


def padded(x: Array, size: int, value: float = 0, kind: Any = None) -> Tensor:
    """A copy of ``x`` with ``size`` rows; new rows hold ``value``."""
    assert len(x) <= size, f"{len(x)} do not fit a bucket of {size}"
    out = np.full((size, *x.shape[1:]), value, kind or x.dtype)
    out[: len(x)] = x
    return torch.from_numpy(out)
