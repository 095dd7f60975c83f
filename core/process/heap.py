"""Freed memory goes back to the system between steps, and in the API process beside its work. Torch-free.

Tensors of ever new sizes and small things that live long share the C library's heap: the gaps between them stay with
the process, some 25 MB for a thousand mixed requests, until the library is asked to return the pages inside them.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable

QUIET = 1.0
"""Seconds without work before a trim, which may take 20 ms: who asks again at once does not wait for it."""

OFTEN = 30.0
"""Seconds between trims at least."""

LATEST = 60.0
"""Seconds without a trim after which a process that is never quiet makes one between two steps."""


def trim() -> None:
    """Returns unused pages; nothing where the C library has no such call."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class Tidier:
    """When to trim.

    Args:
        trim: what to do.
        clock: seconds.
    """

    def __init__(self, trim: Callable[[], None] = trim, clock: Callable[[], float] = time.monotonic) -> None:
        self._trim = trim
        self._clock = clock
        self._last = clock()
        self._untidy = False

    def wait(self) -> float | None:
        """Seconds that a process without work sleeps before it calls ``tidy``; None: for good."""
        return max(QUIET, self._last + OFTEN - self._clock()) if self._untidy else None

    def tidy(self) -> None:
        """Trims."""
        self._trim()
        self._last, self._untidy = self._clock(), False

    def stepped(self) -> None:
        """After each step: trims where no quiet moment came for long."""
        self._untidy = True
        if self._clock() - self._last > LATEST:
            self.tidy()


async def keep_tidy(steps: Callable[[], int], trim: Callable[[], None] = trim, often: float = OFTEN) -> None:
    """For a process that lives in an event loop: trims in a thread while ``steps`` grows; ends when cancelled."""
    seen = steps()
    while True:
        await asyncio.sleep(often)
        if steps() != seen:
            seen = steps()
            await asyncio.to_thread(trim)
