"""Blocks of the KV cache in host memory, and their copies, which run in the order of launches: nobody waits for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trencadis.core.backend import LayerKV
from trencadis.core.shared_constants import SINK_BLOCK
from trencadis.core.step import BlockMove


class CopyingBackend(Protocol):
    """What a backend has besides where its policy says ``host_kv``."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host, not initialised, from and to which copies run while the host goes on."""
        ...

    def in_order(self, copies: Callable[[], None]) -> None:
        """Runs copies between device and host memory after all launches so far and before all later ones."""
        ...


class BlockCopies(Protocol):
    """Copies of blocks between device and host memory."""

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Copies blocks out and back, one after the other, before all later launches."""
        ...


class PlannedCopies(BlockCopies, Protocol):
    """Copies by launches of their own, whose buffers exist from the start."""

    def rehearse(self, kv: Sequence[LayerKV]) -> None:
        """Runs every launch on caches that are dropped afterwards: what it holds at its most is measured."""
        ...

    def bind(self, kv: Sequence[LayerKV], graphs: bool) -> None:
        """Takes the caches, and makes what launches need; ``graphs``: as graphs, where the device's mode has them."""
        ...

    def hold(self, slots: int) -> None:
        """Takes host memory for so many blocks."""
        ...


class PlanningBackend(Protocol):
    """What a backend has besides where its policy says ``host_blocks``."""

    def block_copies(self, kv: Sequence[LayerKV]) -> PlannedCopies:
        """Copies of the blocks of such caches; buffers are made now."""
        ...


def block_parts(kv: Sequence[LayerKV], blocks: int) -> list[Tensor]:
    """uint8 [blocks, bytes]: what each tensor of the caches holds of a block.

    Args:
        blocks: of the caches, the reserved ones included; tensors begin with blocks or with their tokens.
    """
    tensors = [t for x in kv for t in (x.k, x.v, x.k_scale, x.v_scale, x.kept) if t is not None and t.numel()]
    return [t.view(blocks, -1).view(torch.uint8) for t in tensors]


class HostKV:
    """Slots of host memory, each the bytes of one block over all layers.

    Args:
        parts: ``block_parts`` of the caches.
        slots: blocks that host memory holds.
        spare: uint8 [bytes of a block] on the device, through which a block goes in one copy.
    """

    def __init__(self, backend: CopyingBackend, parts: list[Tensor], slots: int, spare: Tensor) -> None:
        self._backend, self._parts, self._spare = backend, parts, spare
        self._pieces = list(torch.split(spare, [part.shape[1] for part in parts]))
        self._host = backend.host_memory((slots, len(spare)), torch.uint8)
        # The sink, there and back: what a first copy makes is made now.
        self.run([BlockMove(SINK_BLOCK, 0, True), BlockMove(SINK_BLOCK, 0, False)])

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Copies blocks out and back, one after the other: each may take the block or slot of the one before."""
        self._backend.in_order(lambda: self._copy(moves))

    def _copy(self, moves: Sequence[BlockMove]) -> None:
        for block, slot, out in moves:
            rows = [part[block] for part in self._parts]
            if out:
                torch.cat(rows, out=self._spare)
                self._host[slot].copy_(self._spare, non_blocking=True)
            else:
                self._spare.copy_(self._host[slot], non_blocking=True)
                torch._foreach_copy_(rows, self._pieces)
