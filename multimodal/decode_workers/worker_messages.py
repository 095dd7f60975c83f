"""Messages between a pool and its workers: 12 bytes of lengths, a JSON object, then the buffers it announces.

Nothing in a message is executed: job names are looked up in a table, buffers are raw bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trencadis.core.json_types import JsonObject

HEAD = struct.Struct(">IQ")
"""The size of the JSON object and the total size of all buffers, in bytes."""
MAX_OBJECT = 1 << 20
CHUNK = 1 << 20
"""Most bytes per system call."""


class ProtocolError(Exception):
    """The other side violates the protocol."""


def pack_message(message: JsonObject, buffers: Sequence[memoryview] = ()) -> bytes:
    """Returns the head and JSON object of a message; the caller sends ``buffers`` after it, in order.

    Args:
        message: JSON values; the key ``sizes`` is reserved.
    """
    sizes = [b.nbytes for b in buffers]
    text = json.dumps({**message, "sizes": sizes}).encode()
    return HEAD.pack(len(text), sum(sizes)) + text


def read_lengths(head: bytes, most: int) -> tuple[int, int]:
    """Reads (bytes of the object, bytes of all buffers) from a head.

    Raises:
        ProtocolError: an object above ``MAX_OBJECT``, or buffers above ``most`` bytes.
    """
    text, body = HEAD.unpack(head)
    if text > MAX_OBJECT or body > most:
        raise ProtocolError
    return text, body


def unpack_message(text: bytes, body: int) -> JsonObject:
    """Parses the object and checks that its ``sizes`` add up to ``body`` bytes.

    Raises:
        ProtocolError: they do not, or the text is not an object.
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
    """Splits ``body``, uint8 [bytes], into views of the given sizes."""
    out, at = [], 0
    for size in sizes:
        out.append(body[at : at + size])
        at += size
    return out


def read_exactly(sock: socket.socket, size: int) -> bytearray:
    """Reads ``size`` bytes from a blocking socket.

    Raises:
        EOFError: the other side has closed it.
    """
    out = bytearray(size)
    view, at = memoryview(out), 0
    while at < size:
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return out
