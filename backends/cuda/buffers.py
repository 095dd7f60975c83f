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


class Buffers:
    """A bucket's input tensors; ``tensors`` keeps their addresses for good.

    The tensor that grows with its use (``inputs.growing``) lies last, so that the used part of everything is one
    contiguous copy. Two staging areas take turns: at most one launch is in flight beyond the one being filled, and an
    area is refilled only when its copy has run.
    """

    def __init__(self, bucket: Bucket, sizes: Sizes, device: torch.device) -> None:
        self.bucket, self.sizes, self.device = bucket, sizes, device
        self._grows, shape = growing(bucket, sizes)
        blank = arrays(bucket, None, sizes)
        leaves = _named(blank)
        at, offset = {}, 0
        for name, array in leaves.items():
            if name != self._grows:
                at[name], offset = offset, _aligned(offset + array.nbytes)
        grows = leaves[self._grows]
        at[self._grows] = offset
        self.bytes = _aligned(offset + math.prod(shape) * grows.itemsize)
        self._flat = torch.zeros(self.bytes, dtype=torch.uint8, device=device)
        self._at = at
        self._staging: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        shapes = {name: shape if name == self._grows else array.shape for name, array in leaves.items()}
        self.tensors: Any = _tree(blank, lambda name, a: self._view(at[name], shapes[name], a.dtype))
        self.fill(None)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copy of ``inputs``, padded; ``None``: padding alone."""
        leaves = _named(arrays(self.bucket, inputs, self.sizes))
        staging = self._next()
        host = staging.numpy()
        for name, array in leaves.items():
            start = self._at[name]
            assert start + array.nbytes <= self.bytes, f"{name} {array.shape} does not fit {self.bucket}"
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        used = self._at[self._grows] + leaves[self._grows].nbytes
        self._flat[:used].copy_(staging[:used], non_blocking=True)
        if self._events:
            self._events[self._turn].record()

    def _next(self) -> Tensor:
        """The staging area whose turn it is, free to be written."""
        cuda = self.device.type == "cuda"
        if not self._staging:
            count = 2 if cuda else 1
            self._staging = [torch.zeros(self.bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(count)]
            self._events = [torch.cuda.Event() for _ in range(count if cuda else 0)]  # type: ignore[no-untyped-call]
        self._turn = (self._turn + 1) % len(self._staging)
        if self._events:
            self._events[self._turn].synchronize()
        return self._staging[self._turn]

    def _view(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        part = self._flat[start : start + math.prod(shape) * dtype.itemsize]
        return part.view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)


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
