"""Frames between a pool and its workers: 12 bytes of lengths, a JSON object, then the buffers it announces.

Nothing on the wire is ever executed: names of jobs are looked up in a table, buffers are raw bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HEAD = struct.Struct(">IQ")
"""Bytes of the JSON object, bytes of all buffers."""
MAX_OBJECT = 1 << 20
CHUNK = 1 << 20
"""Bytes that are handed to one system call at most."""


class ProtocolError(Exception):
    """The other side does not keep the protocol."""


def pack_message(message: dict[str, Any], buffers: Sequence[memoryview] = ()) -> bytes:
    """Lengths and object; ``buffers`` follow on the wire in their order.

    Args:
        message: JSON values; the key ``sizes`` is taken.
    """
    sizes = [b.nbytes for b in buffers]
    text = json.dumps({**message, "sizes": sizes}).encode()
    return HEAD.pack(len(text), sum(sizes)) + text


def read_lengths(head: bytes, most: int) -> tuple[int, int]:
    """(bytes of the object, bytes of the buffers) behind a head.

    Raises:
        ProtocolError: more than the protocol, or than ``most`` bytes of buffers, allows.
    """
    text, body = HEAD.unpack(head)
    if text > MAX_OBJECT or body > most:
        raise ProtocolError
    return text, body


def unpack_message(text: bytes, body: int) -> dict[str, Any]:
    """The object, whose ``sizes`` add up to ``body``.

    Raises:
        ProtocolError: they do not, or it is no object.
    """
    try:
        message = json.loads(text)
        sizes = message["sizes"]
        if all(isinstance(s, int) and s >= 0 for s in sizes) and sum(sizes) == body:
            return dict(message)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ProtocolError


def split_buffers(body: npt.NDArray[np.uint8], sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """``body`` as the buffers it is made of, uncopied."""
    out, at = [], 0
    for size in sizes:
        out.append(body[at : at + size])
        at += size
    return out


def chunks(view: memoryview) -> Iterator[memoryview]:
    """``view`` in pieces of at most ``CHUNK`` bytes."""
    for at in range(0, len(view), CHUNK):
        yield view[at : at + CHUNK]


def read_exactly(sock: socket.socket, size: int) -> bytearray:
    """The next ``size`` bytes of a blocking socket.

    Raises:
        EOFError: the other side is gone.
    """
    out = bytearray(size)
    view, at = memoryview(out), 0
    while at < size:
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return out
