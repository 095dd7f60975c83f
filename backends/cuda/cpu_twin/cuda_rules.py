"""Rules of CUDA that a CPU does not impose, for the twin's runtime: how much memory there is, what a capture permits,
memory whose allocation waits for the card, events that are complete only some time after they were recorded, and the
stream of each thread.

From the CUDA C++ Programming Guide ("CUDA Graphs: Creating a Graph Using Stream Capture", "Implicit Synchronization",
"Lazy Loading") and the runtime's reference ("Stream Management", "Event Management", "Stream synchronization
behavior").
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trencadis.core.device.backend import OutOfDeviceMemory

ORIGIN = "programs"
"""The stream that begins and ends a capture."""


SIZE = 8 << 30
"""Bytes that a twin accounts for without backing them: enough for a KV cache and for captures."""


@dataclass
class TwinMemory:
    """A card's memory as numbers; ``core.device.backend.Memory``."""

    size: int = SIZE
    taken: int = 0

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.taken

    def real_kv_bytes(self) -> int | None:
        return None

    def take(self, count: int) -> None:
        """Charges ``count`` bytes.

        Raises:
            OutOfDeviceMemory: fewer are free.
        """
        if count > self.free():
            raise OutOfDeviceMemory(f"CUDA out of memory (twin): {count} bytes asked, {self.free()} free")
        self.taken += count

    def release(self, count: int) -> None:
        """Releases ``count`` bytes."""
        self.taken -= count


class CaptureError(RuntimeError):
    """A call that a capture does not permit; CUDA invalidates the capture."""


class CaptureOrder:
    """Streams and events of one capture.

    A stream other than the origin takes part once it waits for an event that was recorded in the capture; it must be
    joined: a stream of the capture waits for an event recorded behind its last work, up to the origin.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, tuple[str, int]] = {}
        """Event -> (stream, work of the stream at that point)."""
        self._work: Counter[str] = Counter({ORIGIN: 0})
        self._joined: Counter[str] = Counter()

    def record(self, event: int, stream: str) -> None:
        """Records an event; on a stream that takes no part, it belongs to no capture."""
        if stream in self._work:
            self._recorded[event] = stream, self._work[stream]

    def wait(self, event: int, stream: str, recorded_before: bool) -> None:
        """Makes ``stream`` wait; it takes part from then on.

        Raises:
            CaptureError: the event was recorded outside the capture.
        """
        found = self._recorded.get(event)
        if found is None:
            if stream in self._work and recorded_before:
                raise CaptureError(
                    f"{stream} waits within a capture for an event that was recorded outside it, which a capture does "
                    "not permit"
                )
            return
        source, work = found
        self._work.setdefault(stream, 0)
        if source != stream:
            self._joined[source] = max(self._joined[source], work)
            self._work[stream] += 1
        if stream != ORIGIN and source == ORIGIN:
            self._joined[stream] = min(self._joined[stream], self._work[stream] - 1)

    def add_work(self, stream: str) -> None:
        """Notes work; on a stream that takes no part, it runs outside the graph."""
        if stream in self._work:
            self._work[stream] += 1

    def wait_on_host(self, what: str) -> None:
        """Raises: CaptureError: the host may not wait for a stream that is captured."""
        raise CaptureError(f"{what}: the host waits within a capture, which a capture does not permit")

    def end(self) -> None:
        """Ends the capture.

        Raises:
            CaptureError: work of another stream is not joined to the origin.
        """
        for stream, work in self._work.items():
            if stream != ORIGIN and self._joined[stream] < work:
                raise CaptureError(f"a capture ends with work of {stream} that is not joined to the stream of programs")

    def owns(self, event: int) -> bool:
        """Returns True if the event was recorded within this capture: outside it, nothing may wait for it."""
        return event in self._recorded


class PinnedBlocks:
    """Page-locked blocks by size, as torch's allocator keeps them: a block that is given back serves the next one of
    its size, and a new one is locked by a call that waits for the card.
    """

    def __init__(self) -> None:
        self._free: Counter[int] = Counter()

    def take(self, held: NDArray[np.uint8]) -> bool:
        """Takes a block for ``held``, until that is gone; returns True if it had to be locked anew."""
        size = 1 << max(held.nbytes - 1, 1).bit_length()
        known = self._free[size] > 0
        self._free[size] -= known
        weakref.finalize(held, self._give, size)
        return not known

    def _give(self, size: int) -> None:
        self._free[size] += 1


DEFAULT_STREAM = "default"
"""The stream of a thread that has made no other current. Streams of a runtime, which torch makes non-blocking, neither
wait for it nor does it wait for them.
"""


class ThreadStreams:
    """The current stream of each thread: the default one, but in the thread that makes this object, and within ``on``.

    A call of torch outside a call of the runtime runs there.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._here.stream = ORIGIN

    @property
    def current(self) -> str:
        """The calling thread's stream."""
        return getattr(self._here, "stream", DEFAULT_STREAM)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Makes a stream the calling thread's current one."""
        before = self.current
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before
