"""Copies between host and card: which memory they use, when they read and write it, and how many there were.

The card's queue has work and uploads in order, copies to the host are on a stream of their own. An upload waits for the
launches that read or write its target, a launch for the uploads of its inputs; so both are in one queue. A copy to the
host waits for what was submitted before it, and nothing that is submitted after waits for it: a replay may overwrite a
result that is still being fetched. The card keeps 32 bits of 64-bit integers, so a value that needs more is refused
instead of wrapped.
"""

from __future__ import annotations

import functools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.device_tensor import DeviceTensor

LIMIT = 2**31
"""Values lie in [-LIMIT, LIMIT), as with ``PT_ENABLE_INT64_SUPPORT=0``, the default."""


def check_host(tensor: Tensor) -> None:
    """Refuses a host tensor with values that the card would change by narrowing them to 32 bits."""
    _require_int32("copy", tensor)


@cache
def check_int32(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps ``function`` so that int64 results beyond 32 bits are refused."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, Tensor) and leaf.dtype is torch.int64:
                _require_int32(name, leaf)
        return out

    return run


def _require_int32(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.int64 or tensor.is_meta or tensor.numel() == 0:
        return
    low, high = (int(t) for t in tensor.aminmax())
    if low < -LIMIT or high >= LIMIT:
        raise emulated_errors.too_wide(name, high if high >= LIMIT else low)


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
        self.grouped = False
        """True if other ranks' cards take part in collectives of this one's work."""
        self._work: deque[Callable[[], None]] = deque()
        self._down: deque[tuple[int, Callable[[], None]]] = deque()
        self._landing: deque[Callable[[], object]] = deque()
        self.submitted = Mark(0, 0)
        self.finished = Mark(0, 0)
        self._lock = threading.RLock()  # one thread launches, another may wait for results
        self.events = threading.RLock()
        """The plug-in's lock of events, which a thread holds as long as it waits for one."""
        self.busy_until = 0.0
        """Time (``time.monotonic``) until which the card works at what was submitted so far."""

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

        A copy to the host may read its source after later work has overwritten it: on a card of its own it always does
        here. In a group no later work runs: its collectives would wait for ranks that have no reason to run it yet.
        """
        if self.failures:
            raise self.failures.pop(0)
        goal = self.submitted if mark is None else mark
        late = goal.down > self.finished.down and self.dice is None and not self.grouped
        self._run(self.submitted.work if late else goal.work)
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
    """A place in the queue, as ``torch.hpu.Event``. Threads that use events exclude each other, also while one
    waits.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._mark = Mark(0, 0)
        self._queried = False

    def record(self) -> None:
        """Marks everything that was submitted so far."""
        with self._queue.events:
            self._mark, self._queried = self._queue.submitted, False

    def query(self) -> bool:
        """Returns True if all marked work is done; a second query first runs it, as a device would have by then."""
        with self._queue.events:
            if time.monotonic() < self._queue.busy_until:
                return False
            if self._queried:
                self._queue.wait(self._mark)
            self._queried = True
            return self._queue.is_complete(self._mark)

    def synchronize(self) -> None:
        """Waits for the marked work, but not for the host's part of copies."""
        with self._queue.events:
            time.sleep(max(self._queue.busy_until - time.monotonic(), 0))
            self._queue.wait(self._mark)


GARBAGE = 123
"""Fill value of integer host memory until a copy to it is finished."""


@dataclass
class CopyCounts:
    """Counts of copies to the card, of copies to the host, and of those that went through the driver's staging
    memory.
    """

    up: int = 0
    down: int = 0
    staged: int = 0


class Transfers:
    """The copies of one card, with the timing of pinned and of other memory.

    Pinned memory is read and written by the card itself. Other memory is staged: an upload that does not block may read
    its source late, and a fetch that does not block is finished by a thread of the host.
    """

    def __init__(self, queue: DeviceQueue, computes: bool) -> None:
        self.queue, self.computes = queue, computes
        self.counts = CopyCounts()
        self._pinned: set[int] = set()

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` in pinned memory: ordinary memory whose address the card knows."""
        made = tensor.detach().clone()
        address = made.untyped_storage().data_ptr()
        if address:
            self._pinned.add(address)
            weakref.finalize(made, self._pinned.discard, address)
        return made

    def is_pinned(self, tensor: Tensor) -> bool:
        """Returns True if a host tensor begins where a tensor made by ``pin`` does that still exists.

        The plug-in knows pinned memory by the address of a tensor's first element: a view into it may not be found.
        """
        return tensor.data_ptr() in self._pinned

    def upload(self, target: DeviceTensor, source: Tensor, non_blocking: bool) -> None:
        """Copies from host to card. The source is read when the copy runs."""
        check_host(source)
        self.counts.up += 1
        self.counts.staged += not self.is_pinned(source)
        self.queue.push(lambda: self.copy(target, source))
        if not non_blocking:
            self.queue.wait()

    def download(self, target: Tensor, source: DeviceTensor, non_blocking: bool) -> None:
        """Copies from card to host. Without blocking, ordinary memory holds garbage until the copy is finished."""
        pinned = self.is_pinned(target)
        self.counts.down += 1
        self.counts.staged += not pinned
        if pinned or not non_blocking:
            self.queue.push_down(lambda: self.copy(target, source))
            if not non_blocking:
                self.queue.land()
            return
        buffer = torch.empty_like(target)
        target.fill_(float("nan") if target.is_floating_point() else GARBAGE)
        self.queue.push_down(lambda: self._copy_staged(target, buffer, source))

    def copy_on_device(self, target: DeviceTensor, source: DeviceTensor, non_blocking: bool) -> None:
        """Copies from one device tensor to another."""
        self._enqueue(lambda: self.copy(target, source), non_blocking)

    def _copy_staged(self, target: Tensor, buffer: Tensor, source: DeviceTensor) -> None:
        self.copy(buffer, source)
        self.queue.land_later(lambda: target.copy_(buffer))

    def _enqueue(self, work: Callable[[], None], non_blocking: bool) -> None:
        self.queue.push(work)
        if not non_blocking:
            self.queue.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the values; a card without values clears a target on the host instead."""
        if not self.computes:
            if not isinstance(target, DeviceTensor):
                target.zero_()
            return
        inner = [t.held if isinstance(t, DeviceTensor) else t for t in (target, source)]
        if inner[0] is not inner[1]:
            if isinstance(target, DeviceTensor):
                target.store.untouched = False
            inner[0].copy_(inner[1])
