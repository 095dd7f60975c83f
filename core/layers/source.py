"""Checkpoint tensors by name, as layers see them while they load."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Tensors by canonical name, in the backend's dtype and on its device.

    A tensor that was taken may be a view into a mapped file: it is read, never written.
    """

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor; raises StartupError where it is missing or has another shape."""
        ...

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """``take(name, shape)`` cut to [start, stop) along ``dim``, converting only the cut."""
        ...

    def has(self, name: str) -> bool: ...
