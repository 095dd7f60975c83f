"""Products of LoRA adapters: over all slots under a mask, or slot by slot for consecutive tokens of one slot.

Where own kernels multiply few rows, A and B lie in their panels (``PanelAdapters``), and products are over all slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import dense, weight_packing
from trencadis.backends.cpu.native.dense import PackedWeight
from trencadis.backends.cpu.native.kernel_table import KernelTable
from trencadis.core.device.backend import AdapterRows, AdapterWeights, PackedAdapters, Weight

Linear = Callable[[Tensor, Weight], Tensor]

LEAST_ROWS = 32
"""Rows that a product costs at least: with fewer of them it takes about as long."""


def mask_slots(slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [n, slots]: 1 where a token, int32 [n], has the slot; ``numbers``: those of the slots, int32 [slots]."""
    return (slot[:, None] == numbers).to(dtype)


def add_masked_adapters(y: Tensor, x: Tensor, w: AdapterWeights, mask: Tensor) -> Tensor:
    """Returns y plus ((x A) * mask) B over all slots; ``mask``: [n, slots]. Static shapes, nothing is gathered."""
    slots, parts, rank, inputs = w.a.shape
    shrunk = (x @ w.a.view(-1, inputs).t()).view(-1, slots, parts, rank) * mask[:, :, None, None]
    added = [shrunk[:, :, i].reshape(-1, slots * rank) @ b.view(slots * rank, -1) for i, b in enumerate(w.b)]
    return y + (added[0] if parts == 1 else torch.cat(added, 1))


class SlotRun(NamedTuple):
    """Tokens [start, stop) of a launch, all of which have the adapter of ``slot``."""

    start: int
    stop: int
    slot: int


class CpuAdapterRows(NamedTuple):
    """The adapters of a launch: the mask [n, slots], and runs of tokens; None: products over all slots take less
    time.
    """

    runs: tuple[SlotRun, ...] | None
    mask: Tensor


def group_rows(slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> CpuAdapterRows:
    """Returns the adapters of a launch; ``slot``: int32 [n] on the host, ``numbers``: as in ``mask_slots``."""
    ids = slot.tolist()
    runs, start = list[SlotRun](), 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[start]:
            if ids[start]:
                runs.append(SlotRun(start, at, ids[start]))
            start = at
    mask = mask_slots(slot, numbers, dtype)
    cost = sum(max(run.stop - run.start, LEAST_ROWS) for run in runs)
    return CpuAdapterRows(tuple(runs) if cost < max(len(ids), LEAST_ROWS) * len(numbers) else None, mask)


def add_grouped_adapters(y: Tensor, x: Tensor, w: AdapterWeights, rows: CpuAdapterRows) -> Tensor:
    """Adds the adapters of a launch to ``y`` in place."""
    if rows.runs is None:
        return _add_masked(y, x, w, rows.mask)
    for start, stop, slot in rows.runs:
        shrunk, at = x[start:stop] @ w.a[slot - 1].flatten(0, 1).t(), 0
        rank = w.a.shape[2]
        for i, b in enumerate(w.b):
            part = y[start:stop, at : at + b.shape[2]]
            part.addmm_(shrunk[:, i * rank : (i + 1) * rank], b[slot - 1])
            at += b.shape[2]
    return y


def _add_masked(y: Tensor, x: Tensor, w: AdapterWeights, mask: Tensor) -> Tensor:
    """Computes ``add_masked_adapters`` in place."""
    slots, parts, rank, inputs = w.a.shape
    shrunk = (x @ w.a.view(-1, inputs).t()).view(-1, slots, parts, rank).mul_(mask[:, :, None, None])
    at = 0
    for i, b in enumerate(w.b):
        y[:, at : at + b.shape[2]].addmm_(shrunk[:, :, i].reshape(-1, slots * rank), b.view(slots * rank, -1))
        at += b.shape[2]
    return y


MOST_COLUMNS = 512
"""Most slots times rank of slots in panels: more would cost more than products slot by slot."""


@dataclass(slots=True)
class PanelAdapters:
    """A of all slots as one weight [parts x slots x rank, in], and B of each part as one weight [out, slots x rank]."""

    a: Weight
    b: tuple[Weight, ...]
    panels: tuple[dense.Panels, ...]
    """The packed values of ``a``, then those of each weight of ``b``."""
    slots: int
    rank: int
    nbytes: int

    def put(self, slot: int, part: int, a: Tensor | None, b: Tensor | None) -> None:
        """Writes A [rank, in] and B [rank, out] of a part to a slot, from 0; None: zeros."""
        rank, start = self.rank, (part * self.slots + slot) * self.rank
        table = dense.table_of(self.panels[0])
        _, steps, _, pair = table.shape
        rows = _fill_out(a, rank, steps * pair, table.dtype).view(rank, steps, pair).transpose(0, 1)
        for first in range(0, rank, LANES):
            panel, lane = divmod(start + first, dense.PANEL)
            table[panel, :, lane : lane + LANES] = rows[:, first : first + LANES]
        table = dense.table_of(self.panels[1 + part])
        whole = _fill_out(b, rank, len(table) * dense.PANEL, table.dtype)
        columns = slice(slot * rank // pair, (slot + 1) * rank // pair)
        table[:, columns] = whole.view(rank // pair, pair, len(table), dense.PANEL).permute(2, 0, 3, 1)


LANES = 8
"""Rows of A that are written at a time: all of them lie in one panel."""


def _fill_out(found: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns [rows, columns] that begins with ``found``, with zeros after it."""
    made = torch.zeros((rows, columns), dtype=dtype)
    if found is not None:
        made[: found.shape[0], : found.shape[1]] = found
    return made


def add_panel_adapters(linear: Linear, y: Tensor, x: Tensor, w: PanelAdapters, mask: Tensor) -> Tensor:
    """Adds the adapters of a launch to ``y`` in place; ``linear``: multiplies rows by a packed weight."""
    shrunk = linear(x, w.a).view(len(x), len(w.b), w.slots, w.rank).mul_(mask[:, None, :, None]).flatten(2)
    at = 0
    for part, b in enumerate(w.b):
        added = linear(shrunk[:, part], b)
        y[:, at : at + added.shape[1]].add_(added)
        at += added.shape[1]
    return y


class AdapterOps:
    """The part of the CPU's ops that computes adapters; implements ``core.lora.adapter_store.PackingOps``."""

    if TYPE_CHECKING:  # of the class that this one is mixed into; definitions here would hide those of its other bases

        @property
        def table(self) -> KernelTable: ...
        def linear(self, x: Tensor, w: Weight) -> Tensor: ...

    def prepare_adapters(self, slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> CpuAdapterRows:
        return group_rows(slot, numbers, dtype)

    def add_adapters(self, y: Tensor, x: Tensor, w: AdapterWeights | PackedAdapters, rows: AdapterRows) -> Tensor:
        assert isinstance(rows, CpuAdapterRows)
        if isinstance(w, PanelAdapters):
            return add_panel_adapters(self.linear, y, x, w, rows.mask)
        assert isinstance(w, AdapterWeights)
        return add_grouped_adapters(y, x, w, rows)

    def allocate_adapters(
        self, slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> PackedAdapters | None:
        """Implements ``core.lora.adapter_store.PackingOps``: panels, if own kernels multiply the dtype."""
        if slots * rank > MOST_COLUMNS or not dense.most_rows(self.table, dtype):
            return None
        shapes = [(len(widths) * slots * rank, inputs), *((width, slots * rank) for width in widths)]
        made = [_make_empty_weight(self.table, *shape, dtype) for shape in shapes]
        held = [one for one in made if one is not None and one.panels is not None]
        if len(held) < len(shapes):
            return None
        size = sum(w.out_features * w.in_features for w in held) * dtype.itemsize
        panels = tuple(w.panels for w in held if w.panels is not None)
        return PanelAdapters(held[0], tuple(held[1:]), panels, slots, rank, size)

    def put_adapter(self, w: PackedAdapters, slot: int, part: int, a: Tensor | None, b: Tensor | None) -> None:
        assert isinstance(w, PanelAdapters)
        w.put(slot, part, a, b)


def _make_empty_weight(table: KernelTable, outputs: int, inputs: int, dtype: torch.dtype) -> PackedWeight | None:
    """Returns a packed weight of zeros; None if no own kernel multiplies it."""
    zeros = torch.zeros((outputs, inputs), dtype=dtype)
    made = weight_packing.pack_rows([zeros], [outputs], inputs, dtype, table, own_layout=True)
    if made is None:
        return None
    panels = dense.panels_at(made.memory.data_ptr(), made.memory, outputs, inputs, dtype, None, table)
    return PackedWeight(made.tensor, None, outputs, inputs, panels)
