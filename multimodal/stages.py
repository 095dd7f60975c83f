"""How long a request's media take before the engine sees them. Torch-free.

The record follows the request through tasks by a context variable, so that the fetching and decoding side names a stage
and nobody hands a clock around. Stages of several images overlap: seconds are summed over images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

STAGES = ("fetch", "decode", "resize")


@dataclass(slots=True)
class MediaTimes:
    """One request's media.

    Args:
        seconds: by stage; ``decode`` holds the wait for a worker.
        prepared: images and videos that were decoded for it; the others came from the cache.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    prepared: int = 0


_current: ContextVar[MediaTimes | None] = ContextVar("media_times", default=None)


@contextmanager
def record_media_times() -> Iterator[MediaTimes]:
    """Collects what happens inside, in tasks that are started there too."""
    times = MediaTimes()
    token = _current.set(times)
    try:
        yield times
    finally:
        _current.reset(token)


@contextmanager
def timed_stage(name: str) -> Iterator[None]:
    """Adds the time spent inside; nothing where nobody records."""
    start = time.perf_counter()
    try:
        yield
    finally:
        add_seconds(name, time.perf_counter() - start)


def add_seconds(name: str, seconds: float) -> None:
    """Adds ``seconds`` to a stage."""
    times = _current.get()
    if times is not None:
        times.seconds[name] += seconds


def record_prepared(total: float, resize: object) -> None:
    """One image or video was made in ``total`` seconds, of which a worker says that ``resize`` went into resizing.

    A worker may have been taken over by its image, so what it says is bounded.
    """
    said = float(resize) if isinstance(resize, int | float) and math.isfinite(resize) else 0.0
    said = min(max(said, 0.0), total)
    add_seconds("resize", said)
    add_seconds("decode", total - said)
    times = _current.get()
    if times is not None:
        times.prepared += 1
