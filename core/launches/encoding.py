"""Pictures dealt to ranks (``--mm-encoder-tp-mode data``): each encodes its own with a whole tower, all get the rows.

The ranks of a stage cut a Step's pictures alike, by slots. Nobody waits inside the tower; behind it the rows of all
ranks are gathered, so that every rank's arena holds what one launch would have written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trencadis.core.backend import Backend
from trencadis.core.models.interface import Persistent
from trencadis.core.step import Encode, Int32


def dealt(images: Sequence[Encode], ranks: int) -> list[list[Encode]]:
    """The pictures of each rank: the largest first, each to the rank with the fewest slots, the first of equals."""
    shares: list[list[Encode]] = [[] for _ in range(ranks)]
    slots = [0] * ranks
    for image in sorted(images, key=lambda i: -i.slots):
        rank = slots.index(min(slots))
        shares[rank].append(image)
        slots[rank] += image.slots
    return shares


class GatheredRows:
    """Brings the arenas of a stage's ranks up to date."""

    def __init__(self, backend: Backend, held: Persistent) -> None:
        self._comm, self._device, self._held = backend.comm, backend.device, held

    def exchange(self, shares: Sequence[Sequence[Encode]]) -> None:
        """Stores the rows that the other ranks have encoded; ``shares`` are ``dealt``'s, on all ranks the same."""
        comm, arena = self._comm, self._held.arena
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
    """The arena rows of a rank's pictures, one after the other."""
    return np.concatenate([image.rows for image in share]) if share else np.zeros(0, np.int32)
