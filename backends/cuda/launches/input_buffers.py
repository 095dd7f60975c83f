"""The static tensors of one bucket: one piece of device memory, filled by one copy from pinned host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cuda.launches.attention_work_items import LaunchPlans
from trencadis.backends.cuda.launches.bucket_capacity import align_up
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes, arrays, growing_tensor
from trencadis.backends.cuda.runtime_protocol import Runtime, Stream
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import Inputs

Array = NDArray[Any]


class StageBuffer:
    """Device memory that the buckets of a stage share, and its pinned staging areas.

    The event ``written`` marks the end of the last copy into it, ``last_read`` the end of the last launch that reads
    it. Two staging areas alternate, so that the host fills one while the copy of the other waits for a launch; an area
    is written again only when its copy has run.
    """

    def __init__(self, size: int, runtime: Runtime) -> None:
        self.runtime, self.bytes = runtime, align_up(size)
        self.flat = runtime.buffer(self.bytes)
        self.written, self.last_read = runtime.event(), runtime.event()
        runtime.record(self.last_read, Stream.PROGRAMS)  # the first copy must wait for the zeros
        self._staging: list[Tensor | None] = [None, None]
        self._sent = [runtime.event(), runtime.event()]
        self._area = 0

    def host(self, size: int) -> Array:
        """Returns the next staging area, uint8, at least ``size`` bytes, after its last copy has run."""
        self._area = 1 - self._area
        self.runtime.host_wait(self._sent[self._area])
        area = self._staging[self._area]
        if area is None or area.numel() < size:
            count = min(1 << (size - 1).bit_length(), self.bytes)
            area = self._staging[self._area] = self.runtime.allocate_pinned((count,), torch.uint8)
        return self.runtime.write(area)

    def send(self, used: int, on_copy: Callable[[], None] | None = None) -> None:
        """Queues the copy of the first ``used`` staged bytes, after the launch that still reads the buffer.

        Args:
            on_copy: queues more copies on UPLOADS.
        """
        area = self._staging[self._area]
        assert area is not None
        self.runtime.wait(Stream.UPLOADS, self.last_read)
        self.runtime.upload(self.flat[:used], area[:used])
        if on_copy is not None:
            on_copy()
        self.runtime.record(self._sent[self._area], Stream.UPLOADS)
        self.runtime.record(self.written, Stream.UPLOADS)


class StageBuffers:
    """One shared buffer per stage, as large as its first bucket needs; a bucket that needs more gets its own.

    The engine makes programs largest first, so only shapes outside the plan need more.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._shared: dict[Stage, StageBuffer] = {}

    def of(self, stage: Stage, size: int) -> StageBuffer:
        """Returns memory for a bucket of ``stage`` that needs ``size`` bytes."""
        buffer = self._shared.get(stage)
        if buffer is None:
            buffer = self._shared[stage] = StageBuffer(size, self._runtime)
        return buffer if buffer.bytes >= size else StageBuffer(size, self._runtime)


class InputBuffers:
    """A bucket's input tensors: views of a flat buffer at the bucket's size, whose addresses never change.

    The tensor that grows with its use (``cuda_host_arrays.growing_tensor``) is last, so that the used part of all
    tensors is one contiguous copy.

    Args:
        buffer: memory shared with other buckets, at least ``buffer_bytes(bucket, sizes)`` bytes, which holds another
            bucket's values until it is filled. None: memory of its own, which holds padding from the start.

    Attributes:
        on_copy: called with the host arrays by name; queues further copies on UPLOADS, along with that of the inputs.
    """

    on_copy: Callable[[Mapping[str, Array]], None] | None = None

    def __init__(self, bucket: Bucket, sizes: Sizes, runtime: Runtime, buffer: StageBuffer | None = None) -> None:
        self.bucket, self.sizes, self.plans = bucket, sizes, LaunchPlans()
        self._grows, self._at, shapes, self.bytes = _layout(bucket, sizes)
        self.buffer = buffer or StageBuffer(self.bytes, runtime)
        assert self.buffer.bytes >= self.bytes, f"{bucket} needs {self.bytes} bytes, there are {self.buffer.bytes}"
        blank = arrays(bucket, None, sizes)
        self.tensors: Any = _map_arrays(blank, lambda name, a: self._view(self._at[name], shapes[name], a.dtype))
        if buffer is None:
            self.fill(None)

    @property
    def static(self) -> Tensor:
        """All of the bucket's memory, uint8."""
        return self.buffer.flat[: self.bytes]

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copy of ``inputs``, padded; ``None``: padding only."""
        leaves = _arrays_by_name(arrays(self.bucket, inputs, self.sizes, self.plans))
        used = self._at[self._grows] + leaves[self._grows].nbytes
        host = self.buffer.host(used)
        for name, array in leaves.items():
            start = self._at[name]
            assert start + array.nbytes <= self.bytes, f"{name} {array.shape} does not fit {self.bucket}"
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self.buffer.send(used, None if self.on_copy is None else partial(self.on_copy, leaves))

    def _view(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        part = self.buffer.flat[start : start + math.prod(shape) * dtype.itemsize]
        return part.view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)


def buffer_bytes(bucket: Bucket, sizes: Sizes) -> int:
    """Returns the bytes of a bucket's tensors."""
    return _layout(bucket, sizes).bytes


class _BufferLayout(NamedTuple):
    """The memory of a bucket's tensors: the name of the one that grows, the offset in bytes and the shape of each, and
    the total bytes.
    """

    grows: str
    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    bytes: int


def _layout(bucket: Bucket, sizes: Sizes) -> _BufferLayout:
    """Arranges the tensors of a bucket, that which grows last."""
    grows, shape = growing_tensor(bucket, sizes)
    leaves = _arrays_by_name(arrays(bucket, None, sizes))
    shapes = {name: array.shape for name, array in leaves.items()} | {grows: shape}
    at, offset = {}, 0
    for name in (*(n for n in leaves if n != grows), grows):
        at[name] = offset
        offset = align_up(offset + math.prod(shapes[name]) * leaves[name].itemsize)
    return _BufferLayout(grows, at, shapes, offset)


def _arrays_by_name(tree: Any) -> dict[str, Array]:
    """Returns the arrays of nested named tuples by field; field names must be unique."""
    found: dict[str, Array] = {}
    for name, item in tree._asdict().items():
        if item is not None:
            found.update(_arrays_by_name(item) if isinstance(item, tuple) else {name: item})
    return found


def _map_arrays(tree: Any, make: Any) -> Any:
    """Returns ``tree`` with ``make(name, array)`` in place of its arrays."""
    fields = tree._asdict().items()
    return type(tree)(
        *(
            item if item is None else _map_arrays(item, make) if isinstance(item, tuple) else make(name, item)
            for name, item in fields
        )
    )
