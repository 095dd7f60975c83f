"""The engine as the routes see it; ``server.client`` implements it over the engine's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trencadis.core.process.wire import EngineInfo, EngineStats, GraphPlan, Phase
from trencadis.core.request import Delta, Request

Pixels = npt.NDArray[np.uint8]
"""uint8 [patches, PATCH_VALUES] of one image."""


class EngineClient(Protocol):
    """Requests go in, deltas come out."""

    observers: list[Callable[[EngineStats], None]]
    """Called with every statistics message, because its lists hold only what is new."""

    restarts: int
    """Engines that ended by themselves and were replaced."""

    @property
    def failing(self) -> bool:
        """Whether engines end again and again, and this process should be replaced too."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What the engine came up with; None while it loads."""
        ...

    @property
    def phase(self) -> str:
        """What it is doing, in a word or two (``loading``, ``running``, ``draining``, ``stalled``)."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether requests are taken."""
        ...

    @property
    def healthy(self) -> bool:
        """Neither dead nor stalled."""
        ...

    @property
    def ready(self) -> bool:
        """Accepting, and warm as far as asked."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest counters."""
        ...

    @property
    def plan(self) -> GraphPlan | None:
        """Planned shapes and their states; None where nothing is planned, or not yet."""
        ...

    @property
    def progress(self) -> Phase | None:
        """The last phase of loading that was told."""
        ...

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncIterator[Delta]:
        """Deltas of all choices until each has finished. Raises TrencadisError, at once or from the iterator."""
        ...

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it; unknown ids are ignored."""
        ...
