"""Runs the work on a request concurrently, and measures how long its media take before the engine receives them.

A context variable carries the record through the request's tasks, so no function passes it on. Stages of several images
overlap: seconds are sums over images. Torch-free.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

STAGES = ("fetch", "decode", "resize")
T = TypeVar("T")
_ZEROS: dict[str, float] = dict.fromkeys(STAGES, 0.0)


@dataclass(slots=True)
class MediaTimes:
    """Time spent on one request's media.

    Args:
        seconds: seconds by stage; ``decode`` includes waiting for a worker.
        num_prepared: number of decoded images and videos; the others came from the cache.
        started: time when the first of them was started; ``ended``: when all were ready (``time.monotonic``).
    """

    seconds: dict[str, float] = field(default_factory=_ZEROS.copy)
    num_prepared: int = 0
    started: float = 0.0
    ended: float = 0.0


_current: ContextVar[MediaTimes | None] = ContextVar("media_times", default=None)


@contextmanager
def record_media_times() -> Iterator[MediaTimes]:
    """Records the stages of the code in the block, and of tasks started there."""
    times = MediaTimes(started=time.monotonic())
    token = _current.set(times)
    try:
        yield times
    finally:
        times.ended = time.monotonic()
        _current.reset(token)


@contextmanager
def time_stage(name: str) -> Iterator[None]:
    """Adds the time spent in the block to stage ``name``, if a record is open."""
    start = time.perf_counter()
    try:
        yield
    finally:
        add_seconds(name, time.perf_counter() - start)


def add_seconds(name: str, seconds: float) -> None:
    """Adds ``seconds`` to stage ``name``, if a record is open."""
    times = _current.get()
    if times is not None:
        times.seconds[name] += seconds


def record_prepared(total: float, resize: object) -> None:
    """Records one decoded image or video.

    Args:
        total: seconds that decoding and resizing took.
        resize: seconds of it spent on resizing, as the worker reports them. A hostile file may control its worker, so
            this is clamped to [0, ``total``]; anything but a finite number counts as 0.
    """
    reported = float(resize) if isinstance(resize, int | float) and math.isfinite(resize) else 0.0
    reported = min(max(reported, 0.0), total)
    add_seconds("resize", reported)
    add_seconds("decode", total - reported)
    times = _current.get()
    if times is not None:
        times.num_prepared += 1


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Returns the results in order; the first error, or the caller's cancellation, cancels the others.

    A bare ``gather`` would let them continue: downloads and decoding for a request that has already been answered.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
