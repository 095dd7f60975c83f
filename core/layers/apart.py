"""A backend as parts see it that every rank holds whole."""

from __future__ import annotations

from typing import Any, cast

from trencadis.core.backend import Backend
from trencadis.core.launches.between import SingleRank


class WholeParts:
    """A backend whose layers are held whole: all but the collectives is the rank's own."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.comm = backend, SingleRank()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def held_whole(backend: Backend) -> Backend:
    """``backend`` for layers that its ranks do not share."""
    return cast(Backend, WholeParts(backend))
