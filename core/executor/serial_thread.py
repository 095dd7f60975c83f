"""A thread that runs functions in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SerialThread:
    """Runs functions in order on a daemon thread, so that a stuck device call does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def put(self, work: Callable[[], object]) -> None:
        """Queues ``work``, which must not raise."""
        self._queue.put(work)

    def end(self, patience: float) -> None:
        """Ends the thread after all queued functions; waits for it at most ``patience`` seconds."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
