"""The engine as the routes see it. ``engine.supervisor`` implements it over the engine's process."""

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
"""Takes a delta, or returns False, and leaves it as it is; see ``EngineClient.set_delta_callback``."""


class EngineClient(Protocol):
    """Takes requests and returns deltas."""

    observers: list[Callable[[EngineStats], None]]
    """Called with every statistics message, whose lists hold only what is new."""

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
        """``sleep`` or ``wake`` while that goes on, else empty."""
        ...

    @property
    def failing(self) -> bool:
        """Whether engines fail again and again, so that this process should be replaced too."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What the engine reported when it was ready; None while it loads."""
        ...

    @property
    def phase(self) -> str:
        """What the engine is doing, in a word or two (``loading``, ``running``, ``draining``, ``stalled``)."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the engine takes requests; one that sleeps does."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether the engine is neither dead nor stalled."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests and is as warm as ``--warmup`` asks for."""
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
        """Deltas of all choices until each has finished. Raises TrencadisError, here or from the iterator."""
        ...

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it; unknown ids are ignored."""
        ...

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """Sets a callback that gets a request's deltas at once while its reader is idle; what it returns False for is
        read from the iterator.

        The iterator still gives each choice's last delta and deltas for which it returns False, in order. Unknown ids
        are ignored. Called once the first delta has come: until then the request may change its engine.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Blocks that were computed so far are not found again."""
        ...

    def reset_encoder_cache(self) -> None:
        """Embeddings of images that no running request waits for are forgotten."""
        ...

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        """Ends the engine's process once its requests have ended (``abort``: now); the next request starts another."""
        ...

    async def wake(self) -> None:
        """Starts an engine where one sleeps, and waits until it takes requests."""
        ...


def get_replicas(engine: EngineClient) -> Sequence[EngineClient]:
    """The engines behind a client: those of a fleet, else the client itself."""
    found: Sequence[EngineClient] = getattr(engine, "engines", ())
    return found or [engine]
