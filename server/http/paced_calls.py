"""Spreads many calls over passes of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class PacedCalls:
    """Runs calls in order, at most ``most`` of them in one pass; other callbacks run in between."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedules ``call`` for one of the next passes."""
        self._waiting.append(call)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(self._most, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())  # separately, so that an error in one does not stop the others
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            loop.call_soon(self._pass, loop)
