"""LoRA adapters on Gaudi: one A and one B hold the adapters of all slots and of all parts of a fused matrix.

A launch then has three operations for each matrix that takes adapters: x A, the mask of each token's slot, and the
product with B that adds to the base's outputs. B is zero where a row and a column belong to different parts. That costs
multiplications, a twentieth of those of a 3B model, where a product for each part would cost a slice, a product and a
concatenation of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from trencadis.core.device.backend import AdapterRows, AdapterWeights, PackedAdapters
from trencadis.core.lora.adapter_store import overwrite

T = TypeVar("T")


class JoinedAdapters(NamedTuple):
    """The adapters of a matrix; a column of A and its row of B belong to a part, a slot and a rank, in this order.

    Args:
        a: [inputs, parts x slots x rank].
        b: [parts x slots x rank, outputs of all parts], times the scale of each adapter.
    """

    a: Tensor
    b: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.a.nbytes + self.b.nbytes


class PackedAdapter(NamedTuple):
    """An adapter of a matrix in host memory: A [inputs, rank] and B [rank, outputs] of each part; None: none."""

    parts: tuple[tuple[Tensor, Tensor] | None, ...]


class HostCopy(NamedTuple):
    """A copy of the slots in host memory: the plug-in copies whole tensors, since a part would be a program.

    ``widths``: outputs of each part.
    """

    held: JoinedAdapters
    slots: int
    rank: int
    widths: tuple[int, ...]

    def write(self, slot: int, adapter: PackedAdapter) -> None:
        """Writes an adapter to a slot, from 0; zeros where it has no matrix, or a smaller rank."""
        start = 0
        for part, (width, found) in enumerate(zip(self.widths, adapter.parts, strict=True)):
            first = (part * self.slots + slot) * self.rank
            own = slice(first, first + self.rank)
            overwrite(self.held.a[:, own], None if found is None else found[0])
            overwrite(self.held.b[own, start : start + width], None if found is None else found[1])
            start += width


class SlotMasks:
    """Computes for each of some numbers of columns of x A which of them each token uses, [n, columns] of ``dtype``."""

    def __init__(self, dtype: torch.dtype, columns: tuple[int, ...]) -> None:
        self.dtype, self.columns = dtype, columns

    def __call__(self, slot: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        own = slot[:, None]
        return tuple((own == numbers[:count]).to(self.dtype) for count in self.columns)


class JoinedSlots:
    """The slots of all matrices of a model. ``masks``: computes the masks of a launch."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.masks = device, SlotMasks(dtype, ())
        self._copies: dict[int, HostCopy] = {}
        """Identity of a matrix's tensors on the device -> their copy."""

    def allocate(
        self, slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> JoinedAdapters:
        """Allocates zeros for a matrix whose parts have ``widths`` outputs."""
        columns = len(widths) * slots * rank
        sizes = (inputs, columns), (columns, sum(widths))
        made, copy = (
            JoinedAdapters(*(torch.zeros(size, dtype=dtype, device=device) for size in sizes))
            for device in (self.device, torch.device("cpu"))
        )
        self._copies[id(made.a)] = HostCopy(copy, slots, rank, widths)
        self.masks = SlotMasks(self.masks.dtype, tuple(sorted({*self.masks.columns, columns})))
        return made

    def put(self, w: JoinedAdapters, contents: Mapping[int, PackedAdapter]) -> None:
        """Writes adapters to slots, from 0."""
        copy = self._copies[id(w.a)]
        for slot, adapter in contents.items():
            copy.write(slot, adapter)
        for target, source in zip(w, copy.held, strict=True):
            target.copy_(source)


class JoinedAdapterOps:
    """The part of Gaudi's ops that computes adapters; implements ``core.lora.adapter_store.PackingOps``."""

    adapter_slots: JoinedSlots

    if TYPE_CHECKING:  # of the class that this one is mixed into

        def region(self, run: Callable[..., T], *args: object) -> T: ...

    def prepare_adapters(self, slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Computes the masks of a launch; in compile mode in one small region for each number of tokens."""
        return self.region(self.adapter_slots.masks, slot, numbers)

    def add_adapters(self, y: Tensor, x: Tensor, w: AdapterWeights | PackedAdapters, rows: AdapterRows) -> Tensor:
        assert isinstance(w, JoinedAdapters)
        mask = next(one for one in rows if isinstance(one, Tensor) and one.shape[1] == w.a.shape[1])
        return torch.addmm(y, (x @ w.a) * mask, w.b)

    def allocate_adapters(
        self, slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> PackedAdapters:
        """Allocates zeros; the same shapes for every matrix of a kind, so that layers share programs."""
        return self.adapter_slots.allocate(slots, rank, inputs, widths, dtype)

    def pack_adapter(self, w: PackedAdapters, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedAdapter:
        return PackedAdapter(tuple(None if one is None else (one[0].t().contiguous(), one[1]) for one in parts))

    def put_adapters(self, w: PackedAdapters, contents: Mapping[int, object]) -> None:
        assert isinstance(w, JoinedAdapters)
        self.adapter_slots.put(w, {slot: one for slot, one in contents.items() if isinstance(one, PackedAdapter)})
