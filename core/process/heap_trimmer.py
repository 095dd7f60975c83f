"""Collects garbage and returns freed memory to the system between steps or, in the API process, in the background.

Torch-free. Tensors of ever-changing sizes share the C library's heap with small, long-lived objects. The gaps between
these stay allocated, about 25 MB for a thousand mixed requests, until the library is told to return unused pages. By
default the interpreter collects cycles in the middle of a step, whenever enough objects have been created, and
traverses all live objects: tens of milliseconds with thousands of waiting requests. A process that steps an engine
therefore triggers collections itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET = 1.0
"""Idle seconds before a trim, so that a follow-up request never waits for a 20 ms trim."""

OFTEN = 30.0
"""Minimum seconds between two trims."""

LATEST = 60.0
"""Seconds without a trim after which a permanently busy process trims between two steps."""

YOUNG = 5.0
"""Seconds between two collections of young objects in a busy process."""

FEW = 64
"""Number of open requests up to which an event loop runs full collections, which then take a few milliseconds."""

SELDOM = 100
"""Collections of the middle generation (7,000 new objects each) after which the interpreter runs a full collection
by itself.
"""


def trim() -> None:
    """Returns unused pages to the system, if the C library can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disables garbage collection in a block: imported objects live forever, and would be traversed again and again."""
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
        trim: returns unused pages to the system.
        clock: returns the time in seconds.
        collect: collects garbage of the generations up to its argument.
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
        """Called when loading is complete: excludes all live objects from collections, and disables automatic ones."""
        self._collect(2)
        gc.freeze()
        gc.disable()

    def wait(self) -> float | None:
        """Returns the seconds that an idle process sleeps before it calls ``collect_and_trim``.

        None: it need not wake up.
        """
        return max(QUIET, self._last + OFTEN - self._clock()) if self._untidy else None

    def collect_and_trim(self) -> None:
        """Collects all garbage and trims now."""
        self._collect(2)
        self._trim()
        self._last, self._untidy = self._clock(), False
        self._young = self._last

    def after_step(self) -> None:
        """Called after each step: collects young objects, and trims if the process has been busy for long."""
        self._untidy, now = True, self._clock()
        if now - self._last > LATEST:
            self.collect_and_trim()
        elif now - self._young > YOUNG:
            self._collect(1)
            self._young = now


async def run_trimmer(steps: Callable[[], int], trim: Callable[[], None] = trim, often: float = OFTEN) -> None:
    """Trims an event loop's process in a thread as long as ``steps`` grows; runs until it is cancelled."""
    seen = steps()
    while True:
        await asyncio.sleep(often)
        if steps() != seen:
            seen = steps()
            await asyncio.to_thread(trim)


async def run_collector(
    opened: Callable[[], int], clock: Callable[[], float] = time.monotonic, collect: Callable[[], object] = gc.collect
) -> None:
    """Collects all garbage of an event loop's process while few requests are open, else once a minute.

    Runs until it is cancelled. The interpreter by itself would collect during a burst of requests and traverse all of
    them: 90 ms for 2,000 requests.

    The interpreter would rather do it while a flood comes in, and walk all that waits: 90 ms for 2,000 requests.

    Args:
        opened: returns the number of open requests.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)
    last = clock()
    while True:
        await asyncio.sleep(YOUNG)
        if opened() <= FEW or clock() - last >= LATEST:
            collect()
            last = clock()
