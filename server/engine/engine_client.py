"""The engine's interface for the routes. ``engine.supervisor`` implements it over the engine's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trencadis.core.process.engine_messages import EngineInfo, EngineStats, GraphPlan, Phase
from trencadis.core.request import Delta, Request

Pixels = npt.NDArray[np.uint8]
"""uint8 [patches, PATCH_VALUES] of one image."""

DeltaCallback = Callable[[Delta], bool]
"""Handles a delta and returns True, or returns False without handling it; see ``EngineClient.set_delta_callback``."""


class EngineClient(Protocol):
    """Protocol of an engine: takes requests and returns deltas."""

    observers: list[Callable[[EngineStats], None]]
    """Called with every statistics message, whose lists contain only new entries."""

    on_operation: list[Callable[[str, float], None]]
    """Called after falling asleep or waking, with ``sleep`` or ``wake`` and the seconds that it took."""

    @property
    def restarts(self) -> int:
        """Number of engines that failed and were replaced."""
        ...

    @property
    def sleep_level(self) -> int:
        """0: awake; else the level at which the engine sleeps, until it has woken up."""
        ...

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        ...

    @property
    def failing(self) -> bool:
        """True if engines fail repeatedly, so that this process should be replaced too."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """The engine's report when it became ready; None while it loads."""
        ...

    @property
    def phase(self) -> str:
        """The engine's current activity in a word or two (``loading``, ``running``, ``draining``, ``stalled``)."""
        ...

    @property
    def accepting(self) -> bool:
        """True if the engine accepts requests, also while it sleeps."""
        ...

    @property
    def healthy(self) -> bool:
        """True if the engine is neither dead nor stalled."""
        ...

    @property
    def ready(self) -> bool:
        """True if the engine accepts requests and is as warm as ``--warmup`` requires."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest counters."""
        ...

    @property
    def plan(self) -> GraphPlan | None:
        """Planned shapes and their states; None if there is no plan, or not yet."""
        ...

    @property
    def progress(self) -> Phase | None:
        """The last phase of loading that the engine reported."""
        ...

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncIterator[Delta]:
        """Submits a request; yields deltas of all choices until each has finished. Raises TrencadisError, here or from
        the iterator.
        """
        ...

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it; unknown ids are ignored."""
        ...

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """Sets a callback that gets a request's deltas at once while its reader is idle.

        The iterator still yields each choice's last delta and the deltas for which the callback returns False, in
        order.
        Unknown ids are ignored. Call it after the first delta: until then the request may change its engine.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Makes all cached blocks unavailable to later requests."""
        ...

    def reset_encoder_cache(self) -> None:
        """Drops embeddings of images that no running request waits for."""
        ...

    async def learn_buckets(self, force: bool = False) -> None:
        """Starts a search for shapes that suit the traffic; ``force``: changes to them, whatever they gain.

        Raises:
            Conflict: a search or a change runs.
            NotFound: the engine records no needs.
        """
        ...

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        """Ends the engine's process once its requests have ended (``abort``: now); the next request starts another."""
        ...

    async def wake(self) -> None:
        """Starts the engine if it sleeps, and waits until it accepts requests."""
        ...


def get_replicas(engine: EngineClient) -> Sequence[EngineClient]:
    """Returns the engines of a client: those of a fleet, else the client itself."""
    found: Sequence[EngineClient] = getattr(engine, "engines", ())
    return found or [engine]
