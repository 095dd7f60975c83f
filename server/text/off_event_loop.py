"""Runs work off the event loop, in threads of its own, so that a busy pool delays only work of the same kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Check = Callable[[], None]
"""Function that long work calls between its steps; raises once the caller has been cancelled."""
MEDIUM = 1 << 20
"""Length from which a data URL counts too: it may stand in a field that the server reads as text."""
SMALL = 4096
"""Most characters or items of a value that is processed in the event loop, which takes a few milliseconds."""


class OffEventLoop:
    """Runs functions in threads. Each call that they make must be short or release the interpreter's lock.

    Args:
        threads: at most two; the event loop may wait a switch interval for each.
    """

    def __init__(self, name: str, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[Check], T]) -> T:
        """Returns the result of ``work``. If the caller is cancelled, the work does not start, or ends at its next
        check.
        """
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise asyncio.CancelledError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, check)
        finally:
            left.set()


def no_check() -> None:
    """Does nothing: the check of work on the event loop, which always runs to its end."""


def is_small(*values: object, budget: int = SMALL) -> bool:
    """Returns True if JSON values are small enough to process in the event loop. Data URLs do not count."""
    todo = list(values)
    while todo and budget >= 0:
        one = todo.pop()
        if isinstance(one, str):
            budget -= 0 if one.startswith("data:") and len(one) < MEDIUM else len(one)
        elif isinstance(one, Mapping | list | tuple):
            budget -= len(one)
            if budget >= 0:
                todo.extend(one.values() if isinstance(one, Mapping) else one)
    return budget >= 0
