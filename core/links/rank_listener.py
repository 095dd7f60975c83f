"""The listening socket for ranks; accepts only connections that prove knowledge of the group's key."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from trencadis.core.errors import StartupError
from trencadis.core.links.authenticated_link import KeyedLink
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.handshake import LIMIT, HandshakeFailed, handshake_as_engine
from trencadis.core.links.message_link import LinkClosed, shut_socket
from trencadis.core.links.tcp_and_tls_stream import ByteStream, PlainStream, TlsStream

log = logging.getLogger("trencadis.engine")
WAITING = 32
"""Connections that may prove themselves at the same time, each for ``LIMIT`` seconds; one more closes the oldest."""
SHOWN = 5
"""Number of refused connections that are logged, so that a port scanner cannot fill the log."""


class AuthListener:
    """Listens until every expected rank has connected, or until ``close``.

    Args:
        address: (host, port); port 0: any.
        expected: numbers of the ranks.
        context: the TLS context, or None.

    Raises:
        StartupError: the address cannot be listened on.
    """

    def __init__(
        self, address: tuple[str, int], key: GroupKey, expected: Collection[int], context: ssl.SSLContext | None = None
    ) -> None:
        self.links: dict[int, Future[KeyedLink]] = {number: Future() for number in expected}
        self._key, self._context = key, context
        self._lock = threading.Lock()
        self._proving: dict[socket.socket, None] = {}
        """In the order in which they came."""
        self._refused = 0
        self._closed = False
        self._sock = _listening(address)
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def missing(self) -> list[int]:
        """Returns the ranks that have not connected yet."""
        return [number for number, link in self.links.items() if not link.done()]

    def close(self) -> None:
        """Stops listening; threads that wait for a rank get LinkClosed."""
        with self._lock:
            self._closed = True
            proving = list(self._proving)
        shut_socket(self._sock)
        for sock in proving:
            shut_socket(sock)
        for link in self.links.values():
            with suppress(InvalidStateError):
                link.set_exception(LinkClosed("the listener is closed"))

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError:
                if self._closed or self._sock.fileno() < 0:
                    return
                time.sleep(0.05)  # the connection broke before it was accepted, or there are no descriptors left
                continue
            with self._lock:
                closed, oldest = self._closed, None
                if not closed:
                    if len(self._proving) >= WAITING:
                        oldest = next(iter(self._proving))
                        del self._proving[oldest]
                    self._proving[sock] = None
            if closed:
                shut_socket(sock)
                continue
            if oldest is not None:
                with suppress(OSError):  # its own thread closes it, so that its number is not reused under it
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._prove, args=(sock, str(peer[0])), name="door", daemon=True).start()

    def _prove(self, sock: socket.socket, peer: str) -> None:
        try:
            stream: ByteStream
            stream = PlainStream(sock) if self._context is None else TlsStream(sock, self._context, True, LIMIT)
            number, link = handshake_as_engine(stream, self._key)
        except (HandshakeFailed, OSError) as error:
            self._refuse(peer, str(error) or type(error).__name__)
            shut_socket(sock)
        else:
            self._take(number, link, peer)
        finally:
            with self._lock:
                self._proving.pop(sock, None)

    def _take(self, number: int, link: KeyedLink, peer: str) -> None:
        waiting = self.links.get(number)
        try:
            if waiting is None:
                raise InvalidStateError
            waiting.set_result(link)
        except InvalidStateError:
            self._refuse(peer, f"rank {number} is not expected")
            link.close()
            return
        log.info("rank %d has come from %s", number, peer)
        if not self.missing():
            shut_socket(self._sock)

    def _refuse(self, peer: str, why: str) -> None:
        if self._closed:
            return
        self._refused += 1
        if self._refused <= SHOWN:
            log.warning("a connection from %s is refused: %s", peer, why)


def _listening(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(128)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise StartupError(
            f"--master-addr {host} --master-port {port}: {error.strerror}; name an address of this machine and a free "
            "port"
        ) from None
    return sock
