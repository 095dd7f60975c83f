"""Checkpoint tensors by name, as layers see them while they load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from trencadis.core.quant.quantised_tensor import QTensor

if TYPE_CHECKING:
    from trencadis.core.backend import Weight


class StackedPart(NamedTuple):
    """Rows [start, stop) of the tensor ``name`` [size, inputs], and zeros below up to ``width``."""

    name: str
    size: int
    start: int
    stop: int
    width: int


class StoredRows(NamedTuple):
    """What ``WeightSource.take_stacked`` joins, as a checkpoint stores it; for ops that join and convert as they pack.

    ``parts`` are views [rows, up to ``inputs``] of one type; below each come zeros up to its width, behind each row up
    to ``inputs``. ``dtype``: what the packed weight has to be.
    """

    parts: Sequence[Tensor]
    widths: Sequence[int]
    inputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, without what its layout fills up."""
        return sum(self.widths) * self.inputs * self.dtype.itemsize


class StoringSource(Protocol):
    """What a ``WeightSource`` may have besides: weights before they are converted."""

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        """Columns [start, stop) of ``parts``; None where nothing is stored, or in types of which some differ."""
        ...


class StoringOps(Protocol):
    """What ``Ops`` may have besides: weights are packed from where they are stored."""

    def pack_stored(self, rows: StoredRows, bias: Tensor | None) -> Weight | None:
        """``Ops.pack_weight`` of the joined rows; None where it has to be that."""
        ...


@runtime_checkable
class SharingOps(Protocol):
    """What ``Ops`` may have besides: a packed weight is read row by row, so that a tied table is held once."""

    def table_of(self, weight: Weight) -> Tensor | None:
        """``weight`` [out, in] as a table that ``Ops.embed`` reads, in the same memory; None where it cannot be."""
        ...


@runtime_checkable
class KeepingOps(Protocol):
    """What ``Ops`` may have besides: packed weights are kept in a file, and mapped by a later start."""

    def keeps(self) -> bool:
        """Whether packed weights are mapped, so that few of the checkpoint's bytes are read."""
        ...

    def finish_loading(self) -> int:
        """All weights are packed; returns the bytes of those that were mapped."""
        ...


class WeightSource(Protocol):
    """Tensors by canonical name, in the backend's dtype and on its device.

    A tensor may be a view of a mapped file and must not be written.
    """

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor [shape]; raises StartupError if it is missing or has another shape."""
        ...

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """``take(name, shape)`` restricted to [start, stop) along ``dim``; only that part is converted."""
        ...

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        """The weight [out, in] of module ``name``, restricted to [start, stop) along ``dim``; None: it has 16 bits.

        ``own``: the module whose scheme counts, where a head uses the embedding's table.
        """
        ...

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        """Several weights below each other, [sum of widths, inputs].

        The next call may overwrite it, where the backend's ops say that they copy weights.
        """
        ...

    def has(self, name: str) -> bool: ...

    def kv_scale(self, name: str, kind: str) -> float:
        """The scale of keys (``kind`` k) or values (v) of attention ``name``; StartupError without a good one."""
        ...


def stack(source: WeightSource, parts: Sequence[StackedPart], inputs: int) -> Tensor:
    """``WeightSource.take_stacked`` by ``shard``, in memory of its own."""
    found = []
    for part in parts:
        rows = source.shard(part.name, (part.size, inputs), 0, part.start, part.stop)
        missing = part.width - len(rows)
        found.append(torch.cat([rows, rows.new_zeros((missing, inputs))]) if missing else rows)
    return found[0] if len(found) == 1 else torch.cat(found)
