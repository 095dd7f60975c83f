"""Bytes over TCP, plain or under TLS: sends from several threads beside one that receives."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from trencadis.core.links.link import shut_socket

USER_TIMEOUT = 5_000
"""Milliseconds after which the kernel gives up a peer that acknowledges nothing, also while a process holds the
interpreter's lock."""


class ByteStream(Protocol):
    """One connection."""

    send_now: Callable[[bytes, int], int] | None

    def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        """Bytes that came; 0: the other end is closed.

        Raises:
            TimeoutError: none came for ``limit`` seconds.
        """
        ...

    def close(self) -> None: ...


def tune_socket(sock: socket.socket) -> socket.socket:
    """``sock`` without delays, and with probes of the kernel's own."""
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
    """A TCP connection as it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = tune_socket(sock)
        self.send_now: Callable[[bytes, int], int] | None = sock.send

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of it."""
        self.sock.sendall(data)

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        """Receives what is there, or waits for the first of it."""
        try:
            return self.sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            _readable(self.sock, limit)
        return self.sock.recv_into(buffer)

    def close(self) -> None:
        """Closes it."""
        shut_socket(self.sock)


class TlsStream:
    """The same under TLS. OpenSSL's state is not for two threads at a time, so a lock guards it; nobody waits for the
    network with it.

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
        """Takes what came; False: the other end is closed."""
        _readable(self.sock, max(limit, 0.0))
        data = self.sock.recv(256 << 10)
        with self._state:
            if data:
                self._in.write(data)
            else:
                self._in.write_eof()
        return bool(data)

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of it."""
        left = memoryview(data)
        while left:
            with self._state:
                self._tls.write(left[: 256 << 10])
            self._flush()
            left = left[256 << 10 :]

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        """Receives what is there, or waits for the first of it."""
        while True:
            try:
                with self._state:
                    got: Any = self._tls.read(len(buffer), buffer)  # a count, where there is a buffer
                    return int(got)
            except ssl.SSLWantReadError:
                if not self._more(limit):
                    return 0
            except ssl.SSLEOFError:
                return 0
            except ssl.SSLZeroReturnError:
                return 0

    def close(self) -> None:
        """Closes it; frames have numbers and tags, so that an end without TLS's own alert deceives nobody."""
        shut_socket(self.sock)
