"""Transfers of rows between pipeline stages, through whole tensors: in lazy mode a view must not be written.

A receive into a view makes a new version of the view's base tensor, while captured graphs go on reading the
old one; a view that is sent is a recipe for each of its sizes. So rows are sent in pieces of few sizes, each with a
buffer of its own, and launches that are compiled at the start copy between buffers and the stage's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.host_copies import Staging
from trencadis.backends.hpu.shared_shapes import pieces

SIZES = (1, 4, 16, 64, 256)
"""Numbers of rows of a piece: 341 rows of buffers in total for each tensor that is sent."""


class CopyRows(nn.Module):
    """Copies rows of ``held`` to ``buffer`` (``out``), or back; its input gives the rows."""

    def __init__(self, held: Tensor, buffer: Tensor, out: bool) -> None:
        super().__init__()
        self.held, self.buffer, self.out = held, buffer, out

    def forward(self, indices: Tensor) -> None:
        """``indices``: int32 [rows of the buffer]."""
        at = indices.long()
        if self.out:
            self.buffer.copy_(self.held.index_select(0, at))
        else:
            self.held.index_copy_(0, at, self.buffer)


class RowTransfer:
    """One tensor whose rows are sent (``out``) or received.

    Args:
        held: [rows, hidden].
        exchange: sends a buffer, or receives into it.
    """

    def __init__(
        self, bridge: Bridge, staging: Staging, held: Tensor, out: bool, exchange: Callable[[Tensor], Any]
    ) -> None:
        self._bridge, self._staging, self._out, self._exchange = bridge, staging, out, exchange
        sizes = [n for n in SIZES if n < len(held)]
        self._row_indices = {n: torch.zeros(n, dtype=torch.int32, device=bridge.device) for n in sizes}
        self._buffers = {n: torch.zeros((n, *held.shape[1:]), dtype=held.dtype, device=bridge.device) for n in sizes}
        self._launches: dict[int, Any] = {
            n: bridge.wrap_in_hpu_graph(CopyRows(held, buffer, out)) for n, buffer in self._buffers.items()
        }
        for n in sizes:
            self._launch(n, 1)

    def transfer(self, count: int) -> None:
        """Transfers rows 1 to ``count``."""
        for start, stop in pieces(count, tuple(self._buffers)):
            buffer = self._buffers[stop - start]
            if self._out:
                self._launch(stop - start, 1 + start)
                self._exchange(buffer)
            else:
                self._exchange(buffer)
                self._launch(stop - start, 1 + start)

    def _launch(self, size: int, first: int) -> None:
        """Copies ``size`` rows from ``first`` on; every size is compiled when this object is made."""
        area = self._staging.next(0)
        source = area.write(4 * size).view(torch.int32)
        source.numpy()[:] = np.arange(first, first + size, dtype=np.int32)
        self._row_indices[size].copy_(source, non_blocking=self._staging.pinned)
        area.mark_sent()
        with torch.no_grad():
            self._launches[size].forward(self._row_indices[size], bypass_hpu_graphs=True)
        self._bridge.mark_step()
