"""Work beside the event loop, in a few threads of its own: a busy one holds up others of its kind and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Check = Callable[[], None]
"""Called between the steps of long work; raises once nobody waits for its result."""
MEDIUM = 1 << 20
"""Characters of a data URL from which it counts: it may stand where a text is read."""
SMALL = 4096
"""Characters, or items, up to which work on a value is done on the event loop: a few milliseconds."""


class OffLoop:
    """Runs functions in threads. They hold the interpreter's lock like anybody: each call that they make must be short,
    or release it.

    Args:
        threads: two at most are good, for the event loop may have to wait a switch interval for each.
    """

    def __init__(self, name: str, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[Check], T]) -> T:
        """The result of ``work``. A cancelled caller's work is dropped, or ends at its next check."""
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise asyncio.CancelledError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, check)
        finally:
            left.set()


def no_check() -> None:
    """For work on the event loop, which nobody leaves."""


def small(*values: Any, budget: int = SMALL) -> bool:
    """Whether JSON values hold so little that work on them need not leave the event loop. Data URLs are skipped."""
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
