"""The card's queue: work and uploads in order, copies to the host on a stream of their own.

An upload waits for the launches that read or write its target, a launch for the uploads of its inputs; so both are in
one queue. A copy to the host waits for what was submitted before it, and nothing that is submitted after waits for it:
a
replay may overwrite a result that is still being fetched.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Mark(NamedTuple):
    """A position in the queues: the pieces of work and the copies to the host submitted up to a moment."""

    work: int
    down: int


def _locked(method: F) -> F:
    """Lets one thread at a time run methods of a queue."""

    @functools.wraps(method)
    def run(self: DeviceQueue, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return run  # type: ignore[return-value]


class DeviceQueue:
    """The card's work queue. By default each piece runs as late as allowed: when something waits for it or for later
    work.

    A copy into ordinary host memory goes through a buffer of the driver: the card fills that, and a thread on the
    host finishes it some time later. No event signals when; a copy that blocks waits for it.
    """

    def __init__(self, failures: list[Exception] | None = None) -> None:
        self.failures = [] if failures is None else failures
        """Errors of launches, which the next call that waits raises."""
        self.dice: random.Random | None = None
        """If set, random mode: at any call the card may run any piece that is allowed to run."""
        self._work: deque[Callable[[], None]] = deque()
        self._down: deque[tuple[int, Callable[[], None]]] = deque()
        self._landing: deque[Callable[[], object]] = deque()
        self.submitted = Mark(0, 0)
        self.finished = Mark(0, 0)
        self._lock = threading.RLock()  # one thread launches, another may wait for results

    @_locked
    def push(self, work: Callable[[], None]) -> None:
        """Adds work or an upload."""
        self._work.append(work)
        self.submitted = Mark(self.submitted.work + 1, self.submitted.down)
        self.run_randomly()

    @_locked
    def push_down(self, work: Callable[[], None]) -> None:
        """Adds a copy to the host, which runs after the work that was submitted before it."""
        self._down.append((self.submitted.work, work))
        self.submitted = Mark(self.submitted.work, self.submitted.down + 1)
        self.run_randomly()

    @_locked
    def land_later(self, work: Callable[[], object]) -> None:
        """Defers the host's part of a copy until a later copy blocks."""
        self._landing.append(work)

    @_locked
    def wait(self, mark: Mark | None = None) -> None:
        """Runs everything that was submitted up to ``mark``, as synchronising the device or waiting for an event does.

        A copy to the host may read its source after later work has overwritten it: here it always does.
        """
        if self.failures:
            raise self.failures.pop(0)
        goal = self.submitted if mark is None else mark
        self._run(self.submitted.work if goal.down > self.finished.down and self.dice is None else goal.work)
        while self.finished.down < goal.down:
            self._fetch()

    @_locked
    def land(self) -> None:
        """Blocks for a copy to the host: completes everything before it, on the card and on the host."""
        self.wait()
        while self._landing:
            self._landing.popleft()()

    @_locked
    def is_complete(self, mark: Mark) -> bool:
        """Returns True if everything up to ``mark`` has run."""
        self.run_randomly()
        return self.finished.work >= mark.work and self.finished.down >= mark.down

    @_locked
    def run_randomly(self) -> None:
        """In random mode: runs a random part of the queued work on the card and on the host."""
        if self.dice is None:
            return
        self._run(self.finished.work + self.dice.randint(0, len(self._work)))
        while self._down and self._down[0][0] <= self.finished.work and self.dice.random() < 0.5:
            self._fetch()
        while self._landing and self.dice.random() < 0.3:
            self._landing.popleft()()

    def _run(self, goal: int) -> None:
        while self.finished.work < goal:
            work = self._work.popleft()
            self.finished = Mark(self.finished.work + 1, self.finished.down)
            work()

    def _fetch(self) -> None:
        after, work = self._down.popleft()
        self._run(after)
        self.finished = Mark(self.finished.work, self.finished.down + 1)
        work()


class QueueEvent:
    """A place in the queue, as ``torch.hpu.Event``."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._mark = Mark(0, 0)
        self._queried = False

    def record(self) -> None:
        """Marks everything that was submitted so far."""
        self._mark, self._queried = self._queue.submitted, False

    def query(self) -> bool:
        """Returns True if all marked work is done; a second query first runs it, as a device would have by then."""
        if self._queried:
            self.synchronize()
        self._queried = True
        return self._queue.is_complete(self._mark)

    def synchronize(self) -> None:
        """Waits for the marked work, but not for the host's part of copies."""
        self._queue.wait(self._mark)
