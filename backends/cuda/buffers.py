"""The static tensors of one bucket: one piece of device memory, filled by one copy from pinned host memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cuda.inputs import Sizes, arrays, growing
from trencadis.core.backend import Inputs
from trencadis.core.buckets import Bucket

ALIGNMENT = 256
"""Bytes; each tensor begins at a multiple, so that kernels see the same alignment in every bucket."""

Array = NDArray[Any]


class Room:
    """Device memory and its pinned staging areas.

    Buckets may share one: launches and copies run in turn on one stream, so a copy waits for the launch that reads what
    it overwrites. Two staging areas take turns: at most one launch is in flight beyond the one being filled, and an
    area is refilled only when its copy has run. They are made by the first copy.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes, self.device = _aligned(size), device
        self.flat = torch.zeros(self.bytes, dtype=torch.uint8, device=device)
        self._cuda = device.type == "cuda"
        self._staging: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0

    def host(self) -> Array:
        """uint8 [bytes]: the staging area whose turn it is, free to be written."""
        if not self._staging:
            count = 2 if self._cuda else 1
            self._staging = [torch.zeros(self.bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(count)]
            self._events = [torch.cuda.Event() for _ in range(count if self._cuda else 0)]  # type: ignore[no-untyped-call]
        self._turn = (self._turn + 1) % len(self._staging)
        if self._cuda:
            self._events[self._turn].synchronize()
        return self._staging[self._turn].numpy()

    def send(self, used: int) -> None:
        """Queues the copy of the first ``used`` bytes of what ``host`` gave."""
        self.flat[:used].copy_(self._staging[self._turn][:used], non_blocking=True)
        if self._cuda:
            self._events[self._turn].record()


class Buffers:
    """A bucket's input tensors; ``tensors`` keeps their addresses for good.

    The tensor that grows with its use (``inputs.growing``) lies last, so that the used part of everything is one
    contiguous copy.

    Args:
        room: shared with other buckets, at least ``needed(bucket, sizes)`` bytes: then they hold another bucket's
            values until they are filled. None: memory of their own, which holds padding from the start.
    """

    def __init__(self, bucket: Bucket, sizes: Sizes, device: torch.device, room: Room | None = None) -> None:
        self.bucket, self.sizes = bucket, sizes
        self._grows, self._at, shapes, self.bytes = _layout(bucket, sizes)
        self.room = room or Room(self.bytes, device)
        assert self.room.bytes >= self.bytes, f"{bucket} needs {self.bytes} bytes, there are {self.room.bytes}"
        blank = arrays(bucket, None, sizes)
        self.tensors: Any = _tree(blank, lambda name, a: self._view(self._at[name], shapes[name], a.dtype))
        if room is None:
            self.fill(None)

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copy of ``inputs``, padded; ``None``: padding alone."""
        leaves = _named(arrays(self.bucket, inputs, self.sizes))
        host = self.room.host()
        for name, array in leaves.items():
            start = self._at[name]
            assert start + array.nbytes <= self.bytes, f"{name} {array.shape} does not fit {self.bucket}"
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self.room.send(self._at[self._grows] + leaves[self._grows].nbytes)

    def _view(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        part = self.room.flat[start : start + math.prod(shape) * dtype.itemsize]
        return part.view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)


def needed(bucket: Bucket, sizes: Sizes) -> int:
    """Bytes of a bucket's tensors."""
    return _layout(bucket, sizes)[-1]


def _layout(bucket: Bucket, sizes: Sizes) -> tuple[str, dict[str, int], dict[str, tuple[int, ...]], int]:
    """(the tensor that grows, where each begins, the shape of each, bytes of all)."""
    grows, shape = growing(bucket, sizes)
    leaves = _named(arrays(bucket, None, sizes))
    shapes = {name: array.shape for name, array in leaves.items()} | {grows: shape}
    at, offset = {}, 0
    for name in (*(n for n in leaves if n != grows), grows):
        at[name] = offset
        offset = _aligned(offset + math.prod(shapes[name]) * leaves[name].itemsize)
    return grows, at, shapes, offset


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _named(tree: Any) -> dict[str, Array]:
    """The arrays of nested named tuples by their field; no field occurs twice."""
    found: dict[str, Array] = {}
    for name, item in tree._asdict().items():
        found.update(_named(item) if isinstance(item, tuple) else {name: item})
    return found


def _tree(tree: Any, make: Any) -> Any:
    """``tree`` with ``make(name, array)`` in the places of its arrays."""
    fields = tree._asdict().items()
    return type(tree)(*(_tree(item, make) if isinstance(item, tuple) else make(name, item) for name, item in fields))
