"""The launch queue: copies and replays wait in it until something needs them, as on a device that runs behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Queue:
    """Work in order of submission. A host buffer that is refilled before its copy ran is copied refilled.

    A copy into ordinary host memory goes through a buffer of the driver's: what the queue runs fills that, and a thread
    on the host finishes it some time later. No event tells when; a copy that blocks comes after it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._landing: deque[Callable[[], object]] = deque()
        self.submitted = 0
        self.finished = 0

    def push(self, work: Callable[[], None]) -> None:
        """Adds ``work``, which runs when something waits for it or for anything after it."""
        self._waiting.append(work)
        self.submitted += 1

    def wait(self, position: int | None = None) -> None:
        """Runs everything up to ``position`` (a value of ``submitted``), by default all."""
        goal = self.submitted if position is None else position
        while self.finished < goal:
            work = self._waiting.popleft()
            self.finished += 1
            work()

    def land_later(self, work: Callable[[], object]) -> None:
        """The host's own part of a copy, which runs when a later copy blocks."""
        self._landing.append(work)

    def land(self) -> None:
        """A copy to the host blocks: everything before it is done, on both sides."""
        self.wait()
        while self._landing:
            self._landing.popleft()()
