"""Message links between two processes, in order, and their send queues; the plain link trusts its socket pair.

Small frames are sent at once, others by a thread, so that callers never wait for a socket.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

SMALL = 64 << 10
"""Largest message in bytes that the caller's thread tries to send; larger ones are left to the link's thread."""

Pieces = Sequence[bytes | bytearray | memoryview]


class SendQueue:
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
            self._thread = threading.Thread(target=self._run, name="send_queue", daemon=True)
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


HEADER = struct.Struct("<I")

BEAT_LOADING, BEAT_STEADY = 0xFFFFFFFE, 0xFFFFFFFF
"""In the place of a message's size: signs of life. One that is steady promises the next in time."""

BEAT = 0.5
"""Seconds between two signs of life."""

MISSED_LOCALLY = 8
"""Beats of a process of this machine that may be missing; then it counts as dead: it is stopped, or holds its lock."""


class LinkClosed(Exception):
    """The other process closed its end, or the link is unusable; the text says why, if known."""


class Link(Protocol):
    """Sends and receives messages in order, or raises LinkClosed."""

    def send(self, body: bytes) -> None:
        """Sends one message, perhaps from a thread of the link; may be called by several threads.

        Raises:
            LinkClosed: it cannot be sent. Even a message that was accepted may be lost.
        """
        ...

    def receive(self) -> bytearray:
        """Returns the next message; may be called by one thread only.

        Raises:
            LinkClosed: no more messages will arrive.
        """
        ...

    def beat(self, steady: bool) -> None:
        """A sign of life, where the link needs one. ``steady``: others follow every ``BEAT`` seconds."""
        ...

    def close(self) -> None:
        """Closes both directions; wakes threads that send or receive."""
        ...


class PlainLink:
    """Frames of a little-endian uint32, the message's size, and the message, over a socket pair.

    The system closes the socket of a process that ends; beats show one that is stopped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._steady = False  # the other process has promised beats
        self._send_queue = SendQueue(sock.send, sock.sendall)

    def send(self, body: bytes) -> None:
        """Sends one message."""
        if not self._send_queue.put(lambda: (HEADER.pack(len(body)), body), len(body)):
            raise LinkClosed

    def receive(self) -> bytearray:
        """The next message. Silence of ``MISSED_LOCALLY`` beats, once they are promised, ends the link."""
        while True:
            (size,) = HEADER.unpack(self._receive_exactly(HEADER.size))
            if size < BEAT_LOADING:
                return self._receive_exactly(size)
            self._steady = size == BEAT_STEADY

    def beat(self, steady: bool) -> None:
        """Sends a sign of life, unless something waits to be sent, which is one."""
        if self._send_queue.idle:
            self._send_queue.put(lambda: (HEADER.pack(BEAT_STEADY if steady else BEAT_LOADING),), 0)

    def close(self) -> None:
        """Shuts the socket down; close() alone would wake neither a receiving thread nor the other process."""
        self._send_queue.end()
        shut_socket(self.sock)

    def _receive_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                if self._steady:
                    self._await_data()
                got = self.sock.recv_into(left)
            except (OSError, ValueError):  # ValueError: closed by another thread
                raise LinkClosed from None
            if not got:
                raise LinkClosed
            left = left[got:]
        return data

    def _await_data(self) -> None:
        """Waits until something can be received; raises LinkClosed after too many missing beats."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        for _ in range(MISSED_LOCALLY):  # one by one: while this process is stopped too, its clock goes on
            if poll.poll(BEAT * 1000):
                return
        raise LinkClosed(f"no sign of life for {MISSED_LOCALLY * BEAT:g} s")


def shut_socket(sock: socket.socket) -> None:
    """Ends both directions of a socket and closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
