"""Products of LoRA adapters: slot by slot for consecutive tokens of one slot, or over all slots under a mask.

Own kernels compute all runs of a fused matrix in one call (``native.adapters``). Without them torch multiplies run by
run, or over all slots where that takes less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import lora_adapter_kernels
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable
from trencadis.core.device.backend import AdapterRows, AdapterWeights, PackedAdapters

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
    """The adapters of a launch.

    Args:
        runs: runs of tokens of one slot each; None: without own kernels, products over all slots take less time.
        mask: [n, slots].
        pieces: the runs as own kernels take them (``native.adapters.cut_runs``).
    """

    runs: tuple[SlotRun, ...] | None
    mask: Tensor
    pieces: Tensor


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
    few = cost < max(len(ids), LEAST_ROWS) * len(numbers)
    return CpuAdapterRows(tuple(runs) if few else None, mask, lora_adapter_kernels.cut_runs(runs))


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


class AdapterOps:
    """The part of the CPU's ops that computes adapters; implements ``core.lora.adapter_store.PackingOps``."""

    if TYPE_CHECKING:  # of the class that this one is mixed into; definitions here would hide those of its other bases

        @property
        def table(self) -> KernelTable: ...

    def prepare_adapters(self, slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> CpuAdapterRows:
        return group_rows(slot, numbers, dtype)

    def add_adapters(self, y: Tensor, x: Tensor, w: AdapterWeights | PackedAdapters, rows: AdapterRows) -> Tensor:
        assert isinstance(rows, CpuAdapterRows)
        if isinstance(w, lora_adapter_kernels.SlotAdapters):
            lora_adapter_kernels.add(y, x if x.stride(1) == 1 else x.contiguous(), w, rows.pieces)
            return y
        assert isinstance(w, AdapterWeights)
        return add_grouped_adapters(y, x, w, rows)

    def allocate_adapters(
        self, slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> PackedAdapters | None:
        """Implements ``core.lora.adapter_store.PackingOps``: in the layout of own kernels, if these multiply."""
        return lora_adapter_kernels.allocate(slots, rank, inputs, widths, dtype, self.table)

    def pack_adapter(self, w: PackedAdapters, parts: Sequence[tuple[Tensor, Tensor] | None]) -> object:
        assert isinstance(w, lora_adapter_kernels.SlotAdapters)
        return w.pack(parts)

    def put_adapters(self, w: PackedAdapters, contents: Mapping[int, object]) -> None:
        assert isinstance(w, lora_adapter_kernels.SlotAdapters)
        for slot, found in contents.items():
            assert isinstance(found, lora_adapter_kernels.SlotContents)
            w.put(slot, found)
