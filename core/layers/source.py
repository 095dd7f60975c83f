"""Checkpoint tensors by name, as layers see them while they load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trencadis.core.quant.tensor import QTensor


class StackedPart(NamedTuple):
    """Rows [start, stop) of the tensor ``name`` [size, inputs], and zeros below up to ``width``."""

    name: str
    size: int
    start: int
    stop: int
    width: int


class Source(Protocol):
    """Tensors by canonical name, in the backend's dtype and on its device.

    A tensor may be a view of a mapped file and must not be written.
    """

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor [shape]; raises StartupError if it is missing or has another shape."""
        ...

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """``take(name, shape)`` restricted to [start, stop) along ``dim``; only that part is converted."""
        ...

    def quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        """The weight [out, in] of module ``name``, restricted to [start, stop) along ``dim``; None: it has 16 bits.

        ``own``: the module whose scheme counts, where a head uses the embedding's table.
        """
        ...

    def stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        """Several weights below each other, [sum of widths, inputs].

        The next call may overwrite it, where the backend's ops say that they copy weights.
        """
        ...

    def has(self, name: str) -> bool: ...

    def kv_scale(self, name: str, kind: str) -> float:
        """The scale of keys (``kind`` k) or values (v) of attention ``name``; StartupError without a good one."""
        ...


def stack(source: Source, parts: Sequence[StackedPart], inputs: int) -> Tensor:
    """``Source.stacked`` by ``shard``, in memory of its own."""
    found = []
    for part in parts:
        rows = source.shard(part.name, (part.size, inputs), 0, part.start, part.stop)
        missing = part.width - len(rows)
        found.append(torch.cat([rows, rows.new_zeros((missing, inputs))]) if missing else rows)
    return found[0] if len(found) == 1 else torch.cat(found)
