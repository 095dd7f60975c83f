"""Copies of KV blocks and recurrent states between the card and pinned host memory.

There are launches of fixed shapes, and copies of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.launches.hpu_program import LaunchContexts
from trencadis.backends.hpu.launches.input_and_output_copies import Staging
from trencadis.backends.hpu.launches.region_compiler import own_code, part
from trencadis.core.kv_cache_format import SINK_BLOCK
from trencadis.core.step import BlockMove

Parts = list[list[Tensor]]
"""Tensors of the caches by kind: those of one kind have the same dtype and the same shape per token."""


class BlocksLaunch(nn.Module):
    """Gathers blocks of all layers into the buffers (``out``), or scatters them back; its input names the slots.

    Args:
        areas: the buffers, for each block and each kind of tensor [tensors of the kind, block size, ...].
    """

    def __init__(self, parts: Parts, areas: Sequence[Sequence[Tensor]], out: bool) -> None:
        super().__init__()
        self.parts, self.areas, self.out = parts, tuple(map(tuple, areas)), out

    def forward(self, slots: Tensor) -> None:
        """``slots``: int32 [count x block size], of the flat caches.

        Buffers are written as a whole and caches by ``index_copy_``: a view can neither be written in a graph, nor
        read with another offset by the same recipe.
        """
        at, count = slots.long(), len(self.areas)
        for kind, tensors in enumerate(self.parts):
            if self.out:
                found = [t.index_select(0, at).view(count, -1, *t.shape[1:]) for t in tensors]
                for i, buffer in enumerate(self.areas):
                    buffer[kind].copy_(torch.stack([each[i] for each in found]))
                continue
            for n, t in enumerate(tensors):
                t.index_copy_(0, at, torch.cat([buffer[kind][n] for buffer in self.areas]))


class HpuBlockCopies:
    """``core.launches.host_block_copies.PlannedCopies``.

    What the card puts in order by itself (docs/hpu-internals.md, Copies): an upload waits for launches that read its
    target, a launch for uploads of its inputs, a fetch for the launch that wrote its source. Nothing waits for a fetch:
    neither a launch that overwrites what it reads, nor an upload of what it brings. So the host waits for the fetches
    of one launch before the next upload or gathering; between two Steps they are done.

    Args:
        tensors: of the caches, whose first dimension counts tokens; a recurrent state is a block of one row.
        sizes: blocks of a launch, ascending.
    """

    def __init__(
        self, bridge: Bridge, tensors: Sequence[Tensor], block_size: int, sizes: Sequence[int],
        contexts: LaunchContexts, staging: Staging, compile: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._bridge, self._size, self._sizes = bridge, block_size, tuple(sizes)
        self._contexts, self._staging, self._compile = contexts, staging, compile
        self._shapes = [(len(same), block_size, *same[0].shape[1:]) for same in kinds(tensors)]
        self._types = [same[0].dtype for same in kinds(tensors)]
        device = bridge.device
        self._buffers = [
            [
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype in zip(self._shapes, self._types, strict=True)
            ]
            for _ in range(self._sizes[-1])
        ]
        self._slots = {n: torch.zeros(n * block_size, dtype=torch.int32, device=device) for n in self._sizes}
        self._host: list[list[Tensor]] = []
        self._launches: dict[tuple[bool, int], Callable[[Tensor], Any]] = {}
        self._fetched: Any = bridge.event()
        self._fetching = False

    def rehearse(self, tensors: Sequence[Tensor]) -> None:
        """Runs every launch on the sink of caches that are dropped afterwards."""
        self.bind(tensors, False)
        self._launches.clear()

    def bind(self, tensors: Sequence[Tensor], graphs: bool) -> None:
        """Sets the caches and runs every launch on the sink block; ``graphs``: captures them if the mode has graphs."""
        parts = kinds(tensors)
        for size in self._sizes:
            for out in (True, False):
                self._launches[out, size] = self._launch(BlocksLaunch(parts, self._buffers[:size], out), graphs)
                for _ in range(2):  # the second run replays what the first has recorded
                    self._run(out, [SINK_BLOCK] * size)
        self._bridge.synchronize()

    def hold(self, slots: int) -> None:
        """Pins host memory for ``slots`` blocks, as separate tensors: a view into pinned memory may not count as
        pinned.
        """
        pin, blank = self._bridge.pin, torch.empty
        self._host = [
            [pin(blank(s, dtype=d)) for s, d in zip(self._shapes, self._types, strict=True)] for _ in range(slots)
        ]
        self.run([BlockMove(SINK_BLOCK, 0, True), BlockMove(SINK_BLOCK, 0, False)])

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Copies blocks out and back in the order of ``moves``."""
        for batch in batches(moves, self._sizes[-1]):
            if self._fetching:
                self._fetched.synchronize()
                self._fetching = False
            if batch[0].out:
                self._run(True, [move.block for move in batch])
                self._exchange(batch)
                self._fetched.record()
                self._fetching = True
            else:
                self._exchange(batch)
                self._run(False, [move.block for move in batch])

    def _exchange(self, batch: Sequence[BlockMove]) -> None:
        """Copies whole tensors between buffers and host slots, starting with the first buffer."""
        for buffer, move in zip(self._buffers, batch, strict=False):
            for own, held in zip(buffer, self._host[move.slot], strict=True):
                if move.out:
                    held.copy_(own, non_blocking=self._bridge.pinned)
                else:
                    own.copy_(held, non_blocking=self._bridge.pinned)

    def _run(self, out: bool, blocks: Sequence[int]) -> None:
        size = next(n for n in self._sizes if n >= len(blocks))
        ids = np.full(size, SINK_BLOCK, np.int32)
        ids[: len(blocks)] = blocks
        area = self._staging.next(0)
        source = area.write(self._slots[size].numel() * 4).view(torch.int32)
        source.numpy()[:] = (ids[:, None] * self._size + np.arange(self._size, dtype=np.int32)).reshape(-1)
        self._slots[size].copy_(source, non_blocking=self._staging.pinned)
        area.mark_sent()
        self._launches[out, size](self._slots[size])

    def _launch(self, module: BlocksLaunch, graphs: bool) -> Callable[[Tensor], Any]:
        bridge, contexts = self._bridge, self._contexts
        if not bridge.is_lazy():
            compiled = self._compile(partial(own_code, part), "BlocksLaunch")

            def run(slots: Tensor) -> None:
                with torch.no_grad(), contexts.launch():
                    compiled(module, slots)

            return run
        wrapped = bridge.wrap_in_hpu_graph(module)

        def replay(slots: Tensor) -> None:
            with torch.no_grad():
                if graphs:
                    wrapped.forward(slots)
                    return
                wrapped.forward(slots, bypass_hpu_graphs=True)
                bridge.mark_step()

        return replay


def kinds(tensors: Sequence[Tensor]) -> Parts:
    """Groups tensors by dtype and shape per token."""
    found: dict[Any, list[Tensor]] = {}
    for t in tensors:
        found.setdefault((t.dtype, t.shape[1:]), []).append(t)
    return list(found.values())


def batches(moves: Sequence[BlockMove], most: int) -> Iterator[list[BlockMove]]:
    """Splits ``moves`` into batches for one launch each: one direction, at most ``most`` moves, and no block twice.

    A launch that scatters to one block twice could leave either content in it.
    """
    batch: list[BlockMove] = []
    for move in moves:
        if batch and (len(batch) == most or move.out != batch[0].out or move.block in {m.block for m in batch}):
            yield batch
            batch = []
        batch.append(move)
    if batch:
        yield batch
