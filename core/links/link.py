"""Message links between two processes, in order; the plain link trusts its socket pair."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Protocol

from trencadis.core.links.outbox import Outbox

HEADER = struct.Struct("<I")


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
        """Sends a heartbeat if the link needs one. ``steady``: others follow every ``keyed_link.BEAT`` seconds."""
        ...

    def close(self) -> None:
        """Closes both directions; wakes threads that send or receive."""
        ...


class PlainLink:
    """A link over a socket pair. A frame is the message's size as little-endian uint32, then the message."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._outbox = Outbox(sock.send, sock.sendall)

    def send(self, body: bytes) -> None:
        """Sends one message."""
        if not self._outbox.put(lambda: (HEADER.pack(len(body)), body), len(body)):
            raise LinkClosed

    def receive(self) -> bytearray:
        """Returns the next message."""
        (size,) = HEADER.unpack(self._receive_exactly(HEADER.size))
        return self._receive_exactly(size)

    def beat(self, steady: bool) -> None:
        """Does nothing: the system closes the socket of a process that ends."""

    def close(self) -> None:
        """Shuts the socket down; close() alone would wake neither a receiving thread nor the other process."""
        self._outbox.end()
        shut_socket(self.sock)

    def _receive_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                got = self.sock.recv_into(left)
            except OSError:
                raise LinkClosed from None
            if not got:
                raise LinkClosed
            left = left[got:]
        return data


def shut_socket(sock: socket.socket) -> None:
    """Ends both directions of a socket and closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
