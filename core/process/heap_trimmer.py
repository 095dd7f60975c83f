"""Collects garbage and returns freed memory to the system, between steps or, in the API process, beside its work.
Torch-free.

Tensors of ever new sizes share the C library's heap with small, long-lived objects. The gaps between those stay with
the process, about 25 MB for a thousand mixed requests, until the library is told to return unused pages.

The interpreter collects cycles whenever enough objects were made, in the middle of a step, and walks all that live:
tens of milliseconds where thousands of requests wait. A process that steps an engine therefore decides itself when to.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET = 1.0
"""Seconds without work before a trim, so that a follow-up request never waits for a 20 ms trim."""

OFTEN = 30.0
"""Least seconds between two trims."""

LATEST = 60.0
"""Seconds without a trim after which a process that is always busy trims between two steps."""

YOUNG = 5.0
"""Seconds between two collections of what was made lately, in a process that is busy."""

FEW = 64
"""Open requests with which an event loop collects everything: what lives is walked in a few milliseconds."""

SELDOM = 100
"""Collections of the middle generation (7,000 new objects each) after which the interpreter collects everything by
itself."""


def trim() -> None:
    """Returns unused pages to the system, if the C library can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Collects no garbage meanwhile: what is imported lives for ever, and collections would walk it again and again."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class HeapTrimmer:
    """Decides when to collect garbage and when to return freed memory to the system.

    Args:
        trim: returns unused pages.
        clock: the time in seconds.
        collect: collects garbage, of the generations up to its argument.
    """

    def __init__(
        self,
        trim: Callable[[], None] = trim,
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[int], object] = gc.collect,
    ) -> None:
        self._trim, self._collect = trim, collect
        self._clock = clock
        self._last = self._young = clock()
        self._untidy = False

    def begin(self) -> None:
        """Called when the process is loaded: what lives now is never walked again, and only ``HeapTrimmer``
        collects.
        """
        self._collect(2)
        gc.freeze()
        gc.disable()

    def wait(self) -> float | None:
        """Seconds that an idle process sleeps before it calls ``collect_and_trim``; None: it need not wake up for
        that.
        """
        return max(QUIET, self._last + OFTEN - self._clock()) if self._untidy else None

    def collect_and_trim(self) -> None:
        """Collects all garbage and trims now."""
        self._collect(2)
        self._trim()
        self._last, self._untidy = self._clock(), False
        self._young = self._last

    def after_step(self) -> None:
        """Called after each step: collects what is young, and trims if the process has been busy for long."""
        self._untidy, now = True, self._clock()
        if now - self._last > LATEST:
            self.collect_and_trim()
        elif now - self._young > YOUNG:
            self._collect(1)
            self._young = now


async def run_trimmer(steps: Callable[[], int], trim: Callable[[], None] = trim, often: float = OFTEN) -> None:
    """Trims an event loop's process in a thread, as long as ``steps`` grows; runs until it is cancelled."""
    seen = steps()
    while True:
        await asyncio.sleep(often)
        if steps() != seen:
            seen = steps()
            await asyncio.to_thread(trim)


async def run_collector(
    opened: Callable[[], int], clock: Callable[[], float] = time.monotonic, collect: Callable[[], object] = gc.collect
) -> None:
    """Collects all garbage of an event loop's process while few requests are open, else once a minute, until it is
    cancelled.

    The interpreter would rather do it while a flood comes in, and walk all that waits: 90 ms for 2,000 requests.

    Args:
        opened: counts open requests.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)
    last = clock()
    while True:
        await asyncio.sleep(YOUNG)
        if opened() <= FEW or clock() - last >= LATEST:
            collect()
            last = clock()
