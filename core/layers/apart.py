"""A backend as parts see it that every rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from trencadis.core.backend import Backend


class NoPeers:
    """``core.backend.Comm`` of a part that is not shared."""

    rank = 0
    world = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)


class WholeParts:
    """A backend whose layers are held whole: all but the collectives is the rank's own."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.comm = backend, NoPeers()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def held_whole(backend: Backend) -> Backend:
    """``backend`` for layers that its ranks do not share."""
    return cast(Backend, WholeParts(backend))
