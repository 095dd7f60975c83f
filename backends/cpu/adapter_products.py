"""Products of LoRA adapters: over all slots under a mask, or slot by slot for consecutive tokens of one slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.device.backend import AdapterWeights

LEAST_ROWS = 16
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
    """The adapters of a launch: runs of tokens, or the mask if products over all slots take less time."""

    runs: tuple[SlotRun, ...]
    mask: Tensor | None


def group_rows(slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> CpuAdapterRows:
    """Returns the adapters of a launch; ``slot``: int32 [n] on the host, ``numbers``: as in ``mask_slots``."""
    ids = slot.tolist()
    runs, start = list[SlotRun](), 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[start]:
            if ids[start]:
                runs.append(SlotRun(start, at, ids[start]))
            start = at
    if sum(max(run.stop - run.start, LEAST_ROWS) for run in runs) <= max(len(ids), LEAST_ROWS) * len(numbers):
        return CpuAdapterRows(tuple(runs), None)
    return CpuAdapterRows((), mask_slots(slot, numbers, dtype))


def add_grouped_adapters(y: Tensor, x: Tensor, w: AdapterWeights, rows: CpuAdapterRows) -> Tensor:
    """Adds the adapters of a launch to ``y`` in place."""
    if rows.mask is not None:
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
