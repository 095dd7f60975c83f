"""Mutual authentication of a connection: both ends prove knowledge of the group's key before any other data is read.

The engine sends a mark and a challenge of 32 bytes; the rank answers with the mark, its own challenge, its number and
its proof; the engine answers with its proof. A proof is HMAC-SHA256 of the sender's role, both challenges and the
number, so that a proof can be neither reflected nor replayed. The keys of both directions are derived in the same way.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time

from trencadis.core.links.authenticated_link import MOST, KeyedLink, tagger
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.tcp_and_tls_stream import ByteStream

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
