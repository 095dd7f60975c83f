"""Interfaces for access to checkpoint tensors by name while layers load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from trencadis.core.quant.quantised_tensor import QTensor

if TYPE_CHECKING:
    from trencadis.core.device.backend import Weight


class StackedPart(NamedTuple):
    """Rows [start, stop) of the tensor ``name`` [size, inputs], padded with zero rows to ``width``."""

    name: str
    size: int
    start: int
    stop: int
    width: int


class StoredRows(NamedTuple):
    """The stored parts that ``WeightSource.take_stacked`` would join, for ops that join and convert while packing.

    ``parts`` are views [rows, up to ``inputs``] of one dtype. Each is padded with zero rows to its width, and each row
    with zeros to ``inputs``. ``dtype``: the dtype of the packed weight.
    """

    parts: Sequence[Tensor]
    widths: Sequence[int]
    inputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, without padding of its layout."""
        return sum(self.widths) * self.inputs * self.dtype.itemsize


class StoringSource(Protocol):
    """Optional method of a ``WeightSource``: access to weights before conversion."""

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        """Returns columns [start, stop) of ``parts``; None if they are not stored as such or differ in dtype."""
        ...


class FloatSource(Protocol):
    """Optional method of a ``WeightSource``: access to weights that a model needs in float32."""

    def take_float(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor [shape] in float32, not rounded to the backend's dtype before."""
        ...


class StoringOps(Protocol):
    """Optional method of ``Ops``: packs weights directly from their stored form."""

    def pack_stored(self, rows: StoredRows, bias: Tensor | None) -> Weight | None:
        """Packs the joined rows like ``Ops.pack_weight``; None if the caller must use that instead."""
        ...


@runtime_checkable
class SharingOps(Protocol):
    """Optional method of ``Ops``: reads a packed weight row by row, so that a tied table is held only once."""

    def table_of(self, weight: Weight) -> Tensor | None:
        """Returns ``weight`` [out, in] as a table for ``Ops.embed`` in the same memory; None if that is impossible."""
        ...


@runtime_checkable
class KeepingOps(Protocol):
    """Optional methods of ``Ops``: keep packed weights in a file, which a later start maps."""

    def keeps(self) -> bool:
        """Returns True if packed weights are mapped, so that few bytes of the checkpoint are read."""
        ...

    def finish_loading(self) -> int:
        """Called when all weights are packed; returns the bytes of those that were mapped."""
        ...


class WeightSource(Protocol):
    """Tensors by canonical name, in the backend's dtype and on its device.

    A tensor may be a view of a mapped file and must not be written.
    """

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor [shape]; raises StartupError if it is missing or has another shape."""
        ...

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """Returns ``take(name, shape)`` restricted to [start, stop) along ``dim``; only that part is converted."""
        ...

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        """Returns the weight [out, in] of module ``name``, restricted to [start, stop) along ``dim``; None: not
        quantised.

        ``own``: the module whose scheme applies if a head uses the embedding's table.
        """
        ...

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        """Returns several weights stacked by rows, [sum of widths, inputs].

        The next call may overwrite the result if the backend's ops copy weights (``Ops.copies``).
        """
        ...

    def has(self, name: str) -> bool: ...

    def kv_scale(self, name: str, kind: str) -> float:
        """Returns the scale of keys (``kind`` k) or values (v) of attention ``name``.

        Raises StartupError if it is missing or invalid.
        """
        ...


CODED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""Tensors by which a stored weight is recognised as quantised."""


def take_values(source: WeightSource, name: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Returns the weight [out, in] of module ``name`` in the backend's dtype, even if it is stored quantised.

    For small matrices that are not kept as codes, and that ``--quantization`` leaves as they are.
    """
    coded = any(source.has(f"{name}.{mark}") for mark in CODED)
    found = source.take_quantised(name, shape, 0, 0, shape[0]) if coded else None
    return source.take(f"{name}.weight", shape) if found is None else found.values().to(device)


def take_float(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor in float32, as stored if ``source`` is a ``FloatSource``."""
    if hasattr(source, "take_float"):
        return cast(FloatSource, source).take_float(name, shape)
    return source.take(name, shape).float()


def stack(source: WeightSource, parts: Sequence[StackedPart], inputs: int) -> Tensor:
    """Implements ``WeightSource.take_stacked`` with ``shard``; the result has its own memory."""
    found = []
    for part in parts:
        rows = source.shard(part.name, (part.size, inputs), 0, part.start, part.stop)
        missing = part.width - len(rows)
        found.append(torch.cat([rows, rows.new_zeros((missing, inputs))]) if missing else rows)
    return found[0] if len(found) == 1 else torch.cat(found)
