"""Data-parallel image encoding (``--mm-encoder-tp-mode data``): ranks encode different images and gather the rows.

The ranks of a stage distribute a Step's images in the same way, by slots. No rank waits inside the tower; after it, the
rows of all ranks are gathered, so that every rank's arena holds what a single launch would have written. With planned
launches, all ranks run the bucket of the largest share and gather its rows, padding included, as part of the launch.
Without a plan, each rank runs its own size, or nothing, and transfers as many rows as the largest share has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trencadis.core.device.backend import Backend
from trencadis.core.models.model_and_ops_api import Persistent
from trencadis.core.step import Encode, Int32


def assign_images(images: Sequence[Encode], ranks: int) -> list[list[Encode]]:
    """Distributes images over ranks: largest first, each to the rank with the fewest slots (on ties, the lowest
    rank).
    """
    shares: list[list[Encode]] = [[] for _ in range(ranks)]
    slots = [0] * ranks
    for image in sorted(images, key=lambda i: -i.slots):
        rank = slots.index(min(slots))
        shares[rank].append(image)
        slots[rank] += image.slots
    return shares


class GatheredRows:
    """Synchronises the image arenas of a stage's ranks.

    Args:
        parts: ``ModelConfig.row_parts``.
    """

    def __init__(self, backend: Backend, held: Persistent, parts: int) -> None:
        self._comm, self._ops, self._device = backend.comm, backend.ops, backend.device
        self._arena, self._parts = held.arena, parts

    def gather_in_launch(self, rows: Tensor) -> None:
        """Stores the rows of all ranks at the end of a VISION launch; all ranks must run the same bucket.

        Args:
            rows: int64 [cells], the arena rows in which this rank's tower has stored its output.
        """
        self._ops.by_rows(self._gather, (rows,), self._arena)

    def _gather(self, rows: Tensor, arena: Tensor) -> None:
        """Gathers and stores the rows one part at a time, because a graph on Gaudi cannot hold a write to a view of
        all parts.
        """
        width = arena.shape[1]
        own, numbers = self._ops.gather_rows(arena.view(-1, self._parts * width), rows), rows.view(-1, 1)
        self._ops.cut("collective")
        numbers = self._comm.all_gather(numbers).reshape(-1)  # first: graphs keep everything between two collectives
        values = self._comm.all_gather(own).reshape(-1, self._parts * width)
        for i in range(self._parts):
            self._ops.scatter_rows(arena, self._of(numbers, i), values[:, i * width : (i + 1) * width])

    def _of(self, rows: Tensor, part: int) -> Tensor:
        """Returns the rows of the arena's tensor that hold a given part of ``rows``."""
        return rows if self._parts == 1 else rows * self._parts + part

    def exchange(self, shares: Sequence[Sequence[Encode]]) -> None:
        """Stores the rows that the other ranks have encoded.

        ``shares`` come from ``assign_images`` and are equal on all ranks.
        """
        comm, arena = self._comm, self._arena.view(-1, self._parts * self._arena.shape[1])
        rows = [_rows(share) for share in shares]
        most = max(len(r) for r in rows)
        mine = np.zeros(most, np.int64)
        mine[: len(rows[comm.rank])] = rows[comm.rank]
        with torch.inference_mode():
            own = arena[torch.from_numpy(mine).to(self._device)]
            parts = comm.all_gather(own).view(most, len(shares), -1)
            for rank, theirs in enumerate(rows):
                if rank != comm.rank and len(theirs):
                    at = torch.from_numpy(theirs.astype(np.int64)).to(self._device)
                    arena[at] = parts[: len(theirs), rank]


def _rows(share: Sequence[Encode]) -> Int32:
    """Returns the arena rows of a rank's images, concatenated, int32."""
    return np.concatenate([image.rows for image in share]) if share else np.zeros(0, np.int32)
