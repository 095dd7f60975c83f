"""Forwards bytes between a local socket and a link, so that a remote process can be used like a local one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from trencadis.core.links.authenticated_link import HeartbeatThread, KeyedLink
from trencadis.core.links.message_link import LinkClosed, shut_socket

PIECE = 256 << 10
"""Largest message in bytes."""

BACKLOG = 16
"""Number of waiting messages above which the socket is not read, so that its writer blocks."""

PAUSE = 0.001
FLUSH = 5.0
"""Seconds in which the last messages may be sent after the socket has ended."""


class Relay:
    """Forwards on its own threads until the socket or the link ends; then it closes both.

    Args:
        sock: one end of a stream; the relay takes ownership of it and of the link.
        ended: called once, on one of these threads, with the link's reason.
    """

    def __init__(self, sock: socket.socket, link: KeyedLink, ended: Callable[[str], None] = lambda why: None) -> None:
        self._sock, self._link, self._on_end = sock, link, ended
        self._lock = threading.Lock()
        self._over = False
        self._pulse = HeartbeatThread(lambda: link.beat(True))
        for work in (self._out, self._back):
            threading.Thread(target=work, name="relay", daemon=True).start()

    def close(self) -> None:
        """Closes the socket and the link."""
        self._end("")

    def _out(self) -> None:
        try:
            while piece := self._sock.recv(PIECE):
                self._link.send(piece)
                while self._link.backlog > BACKLOG:
                    time.sleep(PAUSE)
        except (OSError, LinkClosed):
            pass
        end = time.monotonic() + FLUSH
        while self._link.backlog and not self._over and time.monotonic() < end:
            time.sleep(PAUSE)
        self._end("")

    def _back(self) -> None:
        why = ""
        try:
            while True:
                self._sock.sendall(self._link.receive())
        except LinkClosed as closed:
            why = str(closed)
        except OSError:
            pass
        self._end(why)

    def _end(self, why: str) -> None:
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._pulse.end()
            self._link.close()
            shut_socket(self._sock)
            self._on_end(why)
