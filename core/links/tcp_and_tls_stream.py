"""Byte streams over TCP, plain or under TLS: several threads may send while one receives."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from trencadis.core.links.message_link import shut_socket

USER_TIMEOUT = 5_000
"""Milliseconds after which the kernel drops a peer that acknowledges nothing.

This works even while a process holds the interpreter's lock.
"""


class ByteStream(Protocol):
    """One connection."""

    send_now: Callable[[bytes, int], int] | None

    def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        """Receives into ``buffer``; returns the number of bytes; 0: the other end is closed.

        Raises:
            TimeoutError: nothing arrived for ``limit`` seconds.
        """
        ...

    def close(self) -> None: ...


def tune_socket(sock: socket.socket) -> socket.socket:
    """Configures ``sock``: no Nagle delay, and keep-alive probes by the kernel."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 8), ("TCP_USER_TIMEOUT", USER_TIMEOUT),
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def _readable(sock: socket.socket, limit: float) -> None:
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    if not waiting.poll(limit * 1000):
        raise TimeoutError


class PlainStream:
    """A TCP connection without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = tune_socket(sock)
        self.send_now: Callable[[bytes, int], int] | None = sock.send

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of ``data``."""
        self.sock.sendall(data)

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        """Receives the bytes that are available, or waits for the first ones."""
        try:
            return self.sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            _readable(self.sock, limit)
        return self.sock.recv_into(buffer)

    def close(self) -> None:
        """Closes the connection."""
        shut_socket(self.sock)


class TlsStream:
    """A TCP connection under TLS. A lock guards OpenSSL's state, which is not thread-safe; it is never held while
    waiting for the network.

    Raises:
        OSError: the handshake failed (``ssl.SSLError``), or took longer than ``limit`` seconds (TimeoutError).
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: bool, limit: float) -> None:
        self.sock = tune_socket(sock)
        self.send_now: Callable[[bytes, int], int] | None = None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._state, self._sending = threading.Lock(), threading.Lock()
        end = time.monotonic() + limit
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._more(end - time.monotonic())
        self._flush()

    def _flush(self) -> None:
        with self._sending:
            with self._state:
                data = self._out.read()
            if data:
                self.sock.sendall(data)

    def _more(self, limit: float) -> bool:
        """Feeds received bytes to TLS; returns False if the other end is closed."""
        _readable(self.sock, max(limit, 0.0))
        data = self.sock.recv(256 << 10)
        with self._state:
            if data:
                self._in.write(data)
            else:
                self._in.write_eof()
        return bool(data)

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of ``data``."""
        left = memoryview(data)
        while left:
            with self._state:
                self._tls.write(left[: 256 << 10])
            self._flush()
            left = left[256 << 10 :]

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        """Receives the bytes that are available, or waits for the first ones."""
        while True:
            try:
                with self._state:
                    got: Any = self._tls.read(len(buffer), buffer)  # a count, because a buffer is given
                    return int(got)
            except ssl.SSLWantReadError:
                if not self._more(limit):
                    return 0
            except ssl.SSLEOFError:
                return 0
            except ssl.SSLZeroReturnError:
                return 0

    def close(self) -> None:
        """Closes the connection without TLS's closing alert.

        Frames have numbers and tags, so that a truncated stream is detected anyway.
        """
        shut_socket(self.sock)
