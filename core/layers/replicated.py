"""A backend wrapper for layers that every rank holds whole."""

from __future__ import annotations

from typing import Any, cast

from trencadis.core.backend import Backend
from trencadis.core.launches.communicators import SingleRank


class ReplicatedBackend:
    """A backend without collectives, for layers that are not sharded; all else is the wrapped backend's."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.comm = backend, SingleRank()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def replicate_layers(backend: Backend) -> Backend:
    """Returns ``backend`` for layers that are not sharded over its ranks."""
    return cast(Backend, ReplicatedBackend(backend))
