"""KV cache blocks and recurrent states in host memory, and the copies to and from them, which run in launch order
without blocking the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trencadis.core.device.backend import LayerKV
from trencadis.core.kv_cache_format import SINK_BLOCK
from trencadis.core.models.model_and_ops_api import RecurrentState
from trencadis.core.step import BlockMove


class CopyingBackend(Protocol):
    """The additional methods of a backend whose policy sets ``host_kv``."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates uninitialised host memory that supports asynchronous copies."""
        ...

    def in_order(self, copies: Callable[[], None]) -> None:
        """Runs copies between device and host memory after all earlier launches and before all later ones."""
        ...


class BlockCopies(Protocol):
    """Copies of blocks, or of recurrent states, between device and host memory."""

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Copies blocks out and back, in order, before all later launches."""
        ...


class PlannedCopies(BlockCopies, Protocol):
    """Copies made by launches of their own, whose buffers are allocated at the start."""

    def rehearse(self, tensors: Sequence[Tensor]) -> None:
        """Runs every launch on temporary caches, to measure the peak memory."""
        ...

    def bind(self, tensors: Sequence[Tensor], graphs: bool) -> None:
        """Sets the caches and prepares the launches; ``graphs``: as graphs if the device's mode has them."""
        ...

    def hold(self, slots: int) -> None:
        """Allocates host memory for ``slots`` blocks."""
        ...


class PlanningBackend(Protocol):
    """The additional methods of a backend whose policy sets ``host_blocks``."""

    def block_copies(self, tensors: Sequence[Tensor]) -> PlannedCopies:
        """Returns copies for the blocks of these tensors of caches; allocates their buffers."""
        ...

    def state_copies(self, tensors: Sequence[Tensor]) -> PlannedCopies:
        """Returns copies for the slots of these tensors of recurrent state; allocates their buffers."""
        ...


def tensors_of(kv: Sequence[LayerKV]) -> list[Tensor]:
    """Returns the tensors of caches that hold anything."""
    return [t for x in kv for t in (x.k, x.v, x.k_scale, x.v_scale, x.kept) if t is not None and t.numel()]


def state_tensors(recurrent: Sequence[RecurrentState]) -> list[Tensor]:
    """Returns the tensors of recurrent layers, whose first dimension counts slots."""
    return [t for layer in recurrent for t in layer if t is not None]


def block_parts(kv: Sequence[LayerKV], blocks: int) -> list[Tensor]:
    """Returns, for each tensor of the caches, a uint8 view [blocks, bytes of a block].

    Args:
        blocks: number of blocks of the caches, including the reserved ones. The first dimension of each tensor counts
            blocks or tokens.
    """
    return [t.view(blocks, -1).view(torch.uint8) for t in tensors_of(kv)]


class HostKV:
    """Slots of host memory; each holds the bytes of one block over all layers.

    Args:
        parts: ``block_parts`` of the caches.
        slots: number of blocks that host memory holds.
        spare: uint8 [bytes of a block], a device buffer that makes each transfer a single copy.
    """

    def __init__(self, backend: CopyingBackend, parts: list[Tensor], slots: int, spare: Tensor) -> None:
        self._backend, self._parts, self._spare = backend, parts, spare
        self._pieces = list(torch.split(spare, [part.shape[1] for part in parts]))
        self._host = backend.host_memory((slots, len(spare)), torch.uint8)
        # Copy the sink block there and back, so that one-time set-up happens now.
        self.run([BlockMove(SINK_BLOCK, 0, True), BlockMove(SINK_BLOCK, 0, False)])

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Copies blocks out and back, in order: each may reuse the block or slot of the previous one."""
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


class HostStates:
    """Slots of host memory; each holds the recurrent state of one sequence over all layers of a rank.

    States are large, so that each tensor is copied by itself, without a transfer buffer.

    Args:
        tensors: ``state_tensors``.
        slots: number of states that host memory holds.
    """

    def __init__(self, backend: CopyingBackend, tensors: Sequence[Tensor], slots: int) -> None:
        self._backend, self._tensors = backend, tensors
        self._host = [backend.host_memory((slots, *t.shape[1:]), t.dtype) for t in tensors]

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Copies states out and back, in order: each may reuse the slot of the previous one, on either side."""
        self._backend.in_order(lambda: self._copy(moves))

    def _copy(self, moves: Sequence[BlockMove]) -> None:
        for state, slot, out in moves:
            for own, held in zip(self._tensors, self._host, strict=True):
                to, source = (held[slot], own[state]) if out else (own[state], held[slot])
                to.copy_(source, non_blocking=True)
