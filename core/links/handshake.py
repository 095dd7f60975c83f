"""Mutual authentication of a connection: both ends prove knowledge of the group's key before any other data is read.

The engine sends a mark and a challenge of 32 bytes; the rank answers with the mark, its own challenge, its number and
its proof; the engine answers with its proof. A proof is HMAC-SHA256 of the sender's role, both challenges and the
number, so that a proof can be neither reflected nor replayed. The keys of both directions are derived in the same way.

Listening socket for ranks; accepts only connections that prove knowledge of the group's key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from trencadis.core.errors import StartupError
from trencadis.core.links.authenticated_link import MOST, KeyedLink, tagger
from trencadis.core.links.byte_stream import ByteStream, PlainStream, TlsStream
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.message_link import LinkClosed, shut_socket

MARK = b"TRNCDS\x00\x01"
NONCE = 32
PROOF = 32
NUMBER = struct.Struct("<I")
CLAIM = len(MARK) + NONCE + NUMBER.size + PROOF
UP_MOST = 64 << 20
"""Largest message in bytes that a rank may send to the engine."""

LIMIT = 5.0
"""Seconds in which a connection must complete the handshake."""


class HandshakeFailed(Exception):
    """The other end does not use this protocol, or has another key."""


def handshake_as_engine(stream: ByteStream, key: GroupKey, limit: float = LIMIT) -> tuple[int, KeyedLink]:
    """Runs the engine's side of the handshake; returns the number of the connected rank and the link to it.

    Raises:
        HandshakeFailed: the other end did not prove knowledge of the key.
        OSError: the connection broke, or ``limit`` seconds went by (TimeoutError).
    """
    end, mine = time.monotonic() + limit, os.urandom(NONCE)
    stream.send_all(MARK + mine)
    claim = _receive_exactly(stream, CLAIM, end)
    mark, theirs = claim[: len(MARK)], claim[len(MARK) :][:NONCE]
    number, proof = claim[len(MARK) + NONCE :][: NUMBER.size], claim[-PROOF:]
    if mark != MARK:
        raise HandshakeFailed("it is no rank of this version")
    if not hmac.compare_digest(proof, key.proof(b"rank", MARK, mine, theirs, number)):
        raise HandshakeFailed("its key is another one")
    stream.send_all(key.proof(b"engine", MARK, mine, theirs, number))
    down, up = _taggers(key, mine, theirs, number)
    return NUMBER.unpack(number)[0], KeyedLink(stream, down, up, UP_MOST)


def handshake_as_rank(stream: ByteStream, key: GroupKey, number: int, limit: float = LIMIT) -> KeyedLink:
    """Runs the rank's side of the handshake; returns the link to the engine.

    Raises:
        HandshakeFailed: the other end is no engine of this group, or refused the connection.
        OSError: the connection broke, or ``limit`` seconds went by (TimeoutError).
    """
    end, mine, said = time.monotonic() + limit, os.urandom(NONCE), NUMBER.pack(number)
    greeting = _receive_exactly(stream, len(MARK) + NONCE, end)
    theirs = greeting[len(MARK) :]
    if greeting[: len(MARK)] != MARK:
        raise HandshakeFailed("what listens there is no engine of this version")
    stream.send_all(MARK + mine + said + key.proof(b"rank", MARK, theirs, mine, said))
    proof = _receive_exactly(stream, PROOF, end)
    if not hmac.compare_digest(proof, key.proof(b"engine", MARK, theirs, mine, said)):
        raise HandshakeFailed("the engine's key is another one")
    down, up = _taggers(key, theirs, mine, said)
    return KeyedLink(stream, up, down, MOST)


def _taggers(key: GroupKey, engine: bytes, rank: bytes, number: bytes) -> tuple[hashlib.blake2b, hashlib.blake2b]:
    """Returns the taggers of both directions.

    They contain the keys, so that no variable holds a key that a crash report could show.
    """
    return tagger(key.proof(b"down", engine, rank, number)), tagger(key.proof(b"up", engine, rank, number))


def _receive_exactly(stream: ByteStream, size: int, end: float) -> bytes:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        wait = end - time.monotonic()
        if wait <= 0:
            raise TimeoutError("it did not prove itself in time")
        got = stream.receive_into(left, wait)
        if not got:
            raise HandshakeFailed("it closed the connection: its key may be another one, or that rank is taken")
        left = left[got:]
    return bytes(data)


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
