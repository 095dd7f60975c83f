"""A thread that does one thing after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SerialThread:
    """Runs what it is given, in order. It never holds a process back: a lane may be stuck with a device for ever."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def put(self, work: Callable[[], object]) -> None:
        """``work`` follows what was put before; it must not raise."""
        self._queue.put(work)

    def end(self, patience: float) -> None:
        """Waits until everything has run, ``patience`` seconds at most."""
        self._queue.put(None)
        self._thread.join(patience)
