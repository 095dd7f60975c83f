"""Returns freed memory to the system, between steps or, in the API process, beside its work. Torch-free.

Tensors of ever new sizes share the C library's heap with small, long-lived objects. The gaps between those stay with
the process, about 25 MB for a thousand mixed requests, until the library is told to return unused pages.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable

QUIET = 1.0
"""Seconds without work before a trim, so that a follow-up request never waits for a 20 ms trim."""

OFTEN = 30.0
"""Least seconds between two trims."""

LATEST = 60.0
"""Seconds without a trim after which a process that is always busy trims between two steps."""


def trim() -> None:
    """Returns unused pages to the system, if the C library can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class Tidier:
    """Decides when to trim.

    Args:
        trim: returns unused pages.
        clock: the time in seconds.
    """

    def __init__(self, trim: Callable[[], None] = trim, clock: Callable[[], float] = time.monotonic) -> None:
        self._trim = trim
        self._clock = clock
        self._last = clock()
        self._untidy = False

    def wait(self) -> float | None:
        """Seconds that an idle process sleeps before it calls ``tidy``; None: it need not wake up for that."""
        return max(QUIET, self._last + OFTEN - self._clock()) if self._untidy else None

    def tidy(self) -> None:
        """Trims now."""
        self._trim()
        self._last, self._untidy = self._clock(), False

    def stepped(self) -> None:
        """Called after each step: trims if the process has been busy for long."""
        self._untidy = True
        if self._clock() - self._last > LATEST:
            self.tidy()


async def keep_tidy(steps: Callable[[], int], trim: Callable[[], None] = trim, often: float = OFTEN) -> None:
    """Trims an event loop's process in a thread, as long as ``steps`` grows; runs until it is cancelled."""
    seen = steps()
    while True:
        await asyncio.sleep(often)
        if steps() != seen:
            seen = steps()
            await asyncio.to_thread(trim)
