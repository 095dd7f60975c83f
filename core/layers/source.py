"""Checkpoint tensors by name, as layers see them while they load."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trencadis.core.quant.tensor import QTensor


class Source(Protocol):
    """Tensors by canonical name, in the backend's dtype and on its device.

    A tensor may be a view of a mapped file and must not be written.
    """

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor [shape]; raises StartupError if it is missing or has another shape."""
        ...

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """``take(name, shape)`` restricted to [start, stop) along ``dim``; only that part is converted."""
        ...

    def quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        """The weight [out, in] of module ``name``, restricted to [start, stop) along ``dim``; None: it has 16 bits.

        ``own``: the module whose scheme counts, where a head uses the embedding's table.
        """
        ...

    def has(self, name: str) -> bool: ...

    def kv_scale(self, name: str, kind: str) -> float:
        """The scale of keys (``kind`` k) or values (v) of attention ``name``; StartupError without a good one."""
        ...
