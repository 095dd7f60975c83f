"""A link carries messages between two processes, in order; the plain one trusts its socket pair."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Protocol

from trencadis.core.links.outbox import Outbox

HEADER = struct.Struct("<I")


class LinkClosed(Exception):
    """The other process closed its end, or the link is of no more use; the text says why, where that is known."""


class Link(Protocol):
    """Messages in order, or LinkClosed."""

    def send(self, body: bytes) -> None:
        """Sends one message, perhaps on a thread of the link; several threads call it.

        Raises:
            LinkClosed: it cannot be sent. A message that was taken may be lost all the same.
        """
        ...

    def receive(self) -> bytearray:
        """The next message; one thread calls it.

        Raises:
            LinkClosed: there will be none.
        """
        ...

    def beat(self, steady: bool) -> None:
        """A sign of life, where the link needs one. ``steady``: others follow every ``keyed.BEAT`` seconds."""
        ...

    def close(self) -> None:
        """Closes both directions; wakes whoever sends or receives."""
        ...


class PlainLink:
    """Frames of a little-endian uint32, the message's size, and the message, over a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._outbox = Outbox(sock.send, sock.sendall)

    def send(self, body: bytes) -> None:
        """Sends one message."""
        if not self._outbox.put(lambda: (HEADER.pack(len(body)), body), len(body)):
            raise LinkClosed

    def receive(self) -> bytearray:
        """The next message."""
        (size,) = HEADER.unpack(self._receive_exactly(HEADER.size))
        return self._receive_exactly(size)

    def beat(self, steady: bool) -> None:
        """Nothing: the system closes the socket of a process that ends."""

    def close(self) -> None:
        """Closes it; close() alone would wake neither a thread that receives nor the other process."""
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
