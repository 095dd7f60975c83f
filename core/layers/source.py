"""Checkpoint tensors by name, as layers see them while they load."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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

    def has(self, name: str) -> bool: ...
