"""Products of rows with LoRA adapters by the library's kernel: A and B of all slots in its layout, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import bounds_checks, kernel_threads, weight_packing
from trencadis.backends.cpu.native.ctypes_structs import AdaptersLayout
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, Op
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES, TYPES

BLOCK = 64
"""Outputs of a block of B: ``ADAPTER_BLOCK`` of adapters.h."""

GROUP = 4
"""Ranks are multiples of this: ``ADAPTER_GROUP`` of adapters.h."""

ROWS = 32
"""Most rows of a piece of a run, so that threads share the rows of a long one."""


class SlotContents(NamedTuple):
    """The adapter of one fused matrix: A [parts, rank, in] and B [blocks, rank, ``BLOCK``], of its largest rank.

    It is made before an upload, which then copies alone: laid out during it, an adapter of a model of half a billion
    parameters made a step 0.3 s longer.
    """

    a: Tensor
    b: Tensor


@dataclass(slots=True)
class SlotAdapters:
    """A and B of all slots of one fused matrix.

    Args:
        a: [slots, parts, rank, in].
        b: [slots, blocks, rank, ``BLOCK``]; each block has outputs of one part, and zeros after the last one.
        places: int64 [blocks, 3]: the part of each block, its first output and its number of outputs.
        kind: kind of the kernels, a number of ``kernel_choice_by_cpu.NUMBERS``.
    """

    a: Tensor
    b: Tensor
    places: Tensor
    kind: int
    layout: AdaptersLayout = field(init=False)
    nbytes: int = field(init=False)
    """Bytes of A and B."""

    def __post_init__(self) -> None:
        _, parts, rank, inputs = self.a.shape
        at = (t.data_ptr() for t in (self.a, self.b, self.places))
        self.layout = AdaptersLayout(*at, parts, rank, inputs, len(self.places), TYPES[self.a.dtype])
        self.nbytes = self.a.nbytes + self.b.nbytes

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> SlotContents:
        """Returns A [rank, in] and B [rank, out] of each part, or zeros for None, as a slot holds them."""
        rank = max((one[0].shape[0] for one in parts if one is not None), default=0)
        a = self.a.new_zeros((len(parts), rank, self.a.shape[3]))
        b = self.b.new_zeros((len(self.places), rank, BLOCK))
        owners = self.places[:, 0].tolist()
        for part, one in enumerate(parts):
            if one is None:
                continue
            own, columns = one[0].shape
            first, count = owners.index(part), owners.count(part)
            a[part, :own, :columns] = one[0]
            blocks = b.new_zeros((own, count * BLOCK))
            blocks[:, : one[1].shape[1]] = one[1]
            b[first : first + count, :own] = blocks.view(own, count, BLOCK).transpose(0, 1)
        return SlotContents(a, b)

    def put(self, slot: int, contents: SlotContents) -> None:
        """Writes the result of ``pack`` to a slot, from 0, and zeros to the rest of its rank."""
        for target, source in zip((self.a[slot], self.b[slot]), contents, strict=True):
            rank = source.shape[1]
            target[:, :rank] = source
            target[:, rank:].zero_()


def allocate(
    slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype, table: KernelTable
) -> SlotAdapters | None:
    """Allocates zeros for a fused matrix whose parts have ``widths`` outputs; None: torch must multiply."""
    if not table.serves(Op.ADAPTERS, DTYPE_NAMES.get(dtype, "")) or rank % GROUP:
        return None
    places, first = list[tuple[int, int, int]](), 0
    for part, width in enumerate(widths):
        places += [(part, first + at, min(BLOCK, width - at)) for at in range(0, width, BLOCK)]
        first += width
    a, b = (slots, len(widths), rank, inputs), (slots, len(places), rank, BLOCK)
    return SlotAdapters(_take(a, dtype), _take(b, dtype), torch.tensor(places, dtype=torch.int64), table.number)


def _take(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Returns zeros in huge pages."""
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return weight_packing.pages.take(count * dtype.itemsize).view(dtype).view(shape)


def cut_runs(runs: Iterable[tuple[int, int, int]]) -> Tensor:
    """Returns int64 [pieces, 3] for ``add``: runs of rows (start, stop, slot from 1), cut into pieces of ``ROWS``."""
    pieces = [
        (at, min(at + ROWS, stop), slot - 1) for start, stop, slot in runs for at in range(start, stop, ROWS)
    ]  # fmt: skip
    return torch.tensor(pieces, dtype=torch.int64).view(-1, 3)


def add(y: Tensor, x: Tensor, w: SlotAdapters, pieces: Tensor) -> None:
    """Adds to the rows of y [n, out] that ``pieces`` names their products x A B, rounded once. A row's bits do not
    depend on the others.
    """
    if bounds_checks.enabled():
        bounds_checks.check_range("slots of adapters", pieces[:, 2], 0, len(w.a))
        bounds_checks.check_range("rows with adapters", pieces[:, :2], 0, len(x) + 1)
    failed = kernel_threads.calls().adapters(
        ctypes.addressof(w.layout), x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), len(x), pieces.data_ptr(),
        len(pieces), w.kind, kernel_threads.launch_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the adapters of {len(x)} rows")
