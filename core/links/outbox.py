"""The send queue of a link: small frames are sent at once, others by a thread, so that callers never wait for a
socket.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

SMALL = 64 << 10
"""Largest message in bytes that the caller's thread tries to send; larger ones are left to the link's thread."""

Pieces = Sequence[bytes | bytearray | memoryview]


class Outbox:
    """Queue of the frames of one link, sent in order.

    Args:
        send_now: ``socket.send`` with flags, or None if there is no non-blocking send.
        send_all: ``socket.sendall``.
    """

    def __init__(
        self, send_now: Callable[[bytes, int], int] | None, send_all: Callable[[bytes | bytearray | memoryview], None]
    ) -> None:
        self._now, self._all = send_now, send_all
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], Pieces]] = deque()
        self._thread: threading.Thread | None = None
        self._ended = False

    def put(self, make: Callable[[], Pieces], size: int) -> bool:
        """Sends the frame that ``make`` returns; it is called once, and frames are made in the order in which they are
        sent.

        Args:
            size: bytes of the message.

        Returns:
            False if nothing can be sent any more.
        """
        with self._changed:
            if self._ended:
                return False
            if self._waiting or self._now is None or size > SMALL:
                self._later(make)
                return True
            data = b"".join(make())
            try:
                sent = self._now(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._ended = True
                return False
            if sent < len(data):
                rest = memoryview(data)[sent:]
                self._later(lambda: (rest,))
            return True

    @property
    def idle(self) -> bool:
        """True if nothing waits to be sent."""
        return not self._waiting

    @property
    def backlog(self) -> int:
        """Number of frames that wait to be sent."""
        return len(self._waiting)

    def end(self) -> None:
        """Discards the waiting frames and stops the thread."""
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()

    def _later(self, make: Callable[[], Pieces]) -> None:
        self._waiting.append(make)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                make = self._waiting[0]  # stays until it is sent, so that nothing overtakes it
            try:
                for piece in make():
                    self._all(piece)
            except OSError:
                return self.end()
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
