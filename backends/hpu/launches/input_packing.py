"""A launch's arrays as at most two pieces of memory: words of 32 bits, and bytes.

The plug-in cannot be relied upon to view a tensor as another dtype: it keeps 32 bits of an int64, so that eight bytes
viewed as one would be another number. Each piece has one type therefore. Words are int32, or float32 in stages that
have
real numbers: whole numbers below 2^24 are exact there, and the body gets them in the type that it expects. Nothing
needs alignment, because a piece's elements are all of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.hpu.launches.trees import rebuild

Array = NDArray[Any]

EXACT = {"int32": 2**31, "float32": 2**24}
"""Integers below this are exact in a word of the dtype."""


@dataclass(frozen=True)
class PackedSlice:
    """The position of an array: elements [start, start + size) of a piece."""

    piece: int
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Packing:
    """The layout of a stage's arrays: ``types`` and ``sizes`` (elements) of the pieces, and each array's slice."""

    types: tuple[np.dtype[Any], ...]
    sizes: tuple[int, ...]
    slices: tuple[PackedSlice, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(t.itemsize * n for t, n in zip(self.types, self.sizes, strict=True))

    def write(self, piece: int, arrays: list[Array], target: Array) -> None:
        """Writes the arrays of one piece, [size] of its type, each in its slice.

        Raises:
            OverflowError: the piece's dtype does not hold an integer exactly.
        """
        most = EXACT.get(self.types[piece].name)
        for slice_, array in zip(self.slices, arrays, strict=True):
            if slice_.piece != piece:
                continue
            if most is not None and array.dtype.kind == "i" and array.dtype != target.dtype:
                _check(array, most)
            target[slice_.start : slice_.start + slice_.size] = array.reshape(-1)

    def views(self, pieces: list[Tensor]) -> list[Tensor]:
        """Returns each array as a view of its piece on the device."""
        return [
            pieces[slice_.piece][slice_.start : slice_.start + slice_.size].view(slice_.shape) for slice_ in self.slices
        ]


def make_packing(arrays: list[Array]) -> Packing:
    """Lays out arrays of these shapes and dtypes, words before bytes; a stage without bytes has one piece."""
    real = any(a.dtype.kind == "f" for a in arrays)
    types = (np.dtype(np.float32 if real else np.int32), np.dtype(np.uint8))
    sizes = [0, 0]
    slices = []
    for array in arrays:
        piece = int(array.dtype == np.uint8)
        slices.append(PackedSlice(piece, sizes[piece], array.shape))
        sizes[piece] += array.size
    count = 2 if sizes[1] else 1
    return Packing(types[:count], tuple(sizes[:count]), tuple(slices))


def types_of(arrays: list[Array]) -> list[torch.dtype]:
    """Returns the torch dtype of each array."""
    return [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]


def cast_inputs(types: Sequence[torch.dtype], body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps ``body`` so that inputs in the dtypes of a packing are converted to ``types``, one per leaf."""

    def run(inputs: Any) -> Any:
        each = iter(types)
        return body(rebuild(inputs, lambda t: t.to(next(each))))

    return run


def _check(array: Array, most: int) -> None:
    if array.size and max(int(array.max()), -int(array.min())) >= most:
        raise OverflowError(
            f"a launch's inputs hold {int(array.max())}; a card's words hold whole numbers below {most}"
        )
