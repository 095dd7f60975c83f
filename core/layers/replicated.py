"""A backend for layers that every rank holds whole."""

from __future__ import annotations

from typing import Any, cast

from trencadis.core.backend import Backend
from trencadis.core.launches.communicators import SingleRank


class ReplicatedBackend:
    """A backend whose layers are held whole: all but the collectives is the rank's own."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.comm = backend, SingleRank()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def replicate_layers(backend: Backend) -> Backend:
    """``backend`` for layers that its ranks do not share."""
    return cast(Backend, ReplicatedBackend(backend))
