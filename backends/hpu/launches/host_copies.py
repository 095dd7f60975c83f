"""Copies between the host and a program's static tensors: pinned memory on the host, at most two uploads a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.hpu_inputs import LaunchForm, arrays
from trencadis.backends.hpu.launches.input_packing import Array, make_packing, types_of
from trencadis.backends.hpu.launches.trees import leaves, rebuild
from trencadis.core.backend import Inputs, TensorsOut, host_output
from trencadis.core.buckets import Bucket

AREAS = 2
"""Staging areas of each kind: the host writes one while the copy of the other is in progress."""


class StagingArea:
    """Pinned host memory that uploads read. It grows to the largest upload, and is reused once its last upload has
    run.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._memory: Tensor | None = None
        self._event: Any = None

    def write(self, count: int) -> Tensor:
        """Returns at least ``count`` bytes (uint8) that may be written; waits for the last upload from this area."""
        if self._event is not None:
            self._event.synchronize()
        if self._memory is None or self._memory.numel() < count:
            self._memory = self._bridge.pin(torch.empty(1 << (count - 1).bit_length(), dtype=torch.uint8))
        return self._memory[:count]

    def mark_sent(self) -> None:
        """Records that the copy of the written bytes is queued."""
        self._event = self._event or self._bridge.event()
        self._event.record()


class Staging:
    """The staging areas of a device, shared by its programs: each kind of piece alternates between its own areas."""

    def __init__(self, bridge: Bridge) -> None:
        self._areas = [[StagingArea(bridge) for _ in range(AREAS)] for _ in range(2)]
        self._current = [0, 0]
        self.pinned = bridge.pinned
        """False: the areas are ordinary memory, and copies from them must block."""

    def next(self, piece: int) -> StagingArea:
        """Returns the next staging area for a kind of piece."""
        self._current[piece] = (self._current[piece] + 1) % AREAS
        return self._areas[piece][self._current[piece]]


class StaticInputs:
    """A bucket's inputs at fixed addresses on the card: views of one or two pieces (``input_packing``).

    A graph reads the views and never writes to them. A check may write to one from outside: that changes its piece.
    """

    def __init__(self, bucket: Bucket, bridge: Bridge, form: LaunchForm) -> None:
        self.bucket, self.form = bucket, form
        self.staging = Staging(bridge)
        """Replaced by the backend with the one that its programs share."""
        blank = arrays(bucket, None, form)
        self._sent: list[Array] = leaves(blank)
        self.types = types_of(self._sent)
        """The dtype in which the body expects each array, whatever the dtype of its piece."""
        self.packing = make_packing(self._sent)
        self.pieces = [self._blank(piece).to(bridge.device) for piece in range(len(self.packing.types))]
        views = iter(self.packing.views(self.pieces))
        self.tensors: Any = rebuild(blank, lambda array: next(views))
        self.bytes = self.packing.bytes

    def _blank(self, piece: int) -> Tensor:
        made = np.empty(self.packing.sizes[piece], self.packing.types[piece])
        self.packing.write(piece, self._sent, made)
        return torch.from_numpy(made)

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copies of the pieces that differ from those sent last: at most two."""
        filled: list[Array] = leaves(arrays(self.bucket, inputs, self.form))
        changed = {
            slice_.piece
            for slice_, last, new in zip(self.packing.slices, self._sent, filled, strict=True)
            if not np.array_equal(last, new)
        }
        for piece in sorted(changed):
            self._send(piece, filled)
        self._sent = filled

    def _send(self, piece: int, filled: list[Array]) -> None:
        kind, size = self.packing.types[piece], self.packing.sizes[piece]
        area = self.staging.next(piece)
        source = area.write(size * kind.itemsize).view(self.pieces[piece].dtype)
        self.packing.write(piece, filled, source.numpy())
        self.pieces[piece].copy_(source, non_blocking=self.staging.pinned)
        area.mark_sent()


class HostOutputPool:
    """Pool of pinned host memory for outputs, by shape and dtype; each piece belongs to one result until that is
    read.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self.pinned = bridge, bridge.pinned
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Returns pinned memory with the shape and dtype of ``like``."""
        free = self._free.setdefault((like.shape, like.dtype), [])
        return free.pop() if free else self._bridge.pin(torch.empty(like.shape, dtype=like.dtype))

    def release(self, memory: Tensor) -> None:
        """Returns a piece of memory to the pool."""
        self._free[memory.shape, memory.dtype].append(memory)


class HpuPending:
    """Outputs on the host; ``core.backend.Pending``.

    All copies but the last are only queued, and the last blocks: the card fetches in order, so that all have arrived
    then.
    Waiting for an event would not be enough: a later launch does not wait for a fetch that still reads its output, and
    for memory that is not pinned no event signals the end of the host's part of the copy.
    """

    def __init__(self, out: TensorsOut, rows: int, landing: HostOutputPool) -> None:
        given = [t for t in out if t is not None]
        held = [landing.take(t) for t in given]
        for i, (target, source) in enumerate(zip(held, given, strict=True)):
            target.copy_(source, non_blocking=landing.pinned and i < len(given) - 1)
        found = iter([t[:rows].numpy().copy() for t in held])
        self._out: Any = host_output(out, [None if t is None else next(found) for t in out])
        for memory in held:
            landing.release(memory)

    def done(self) -> bool:
        """Returns True: the copies have finished, so ``result`` does not wait."""
        return True

    def result(self) -> Any:
        """Returns the outputs on the host."""
        return self._out
