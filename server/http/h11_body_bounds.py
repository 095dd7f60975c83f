"""h11 with bounds on what a client sends: chunks and trailers of a body, request lines and heads; and the refusals.

Each chunk and each trailer of a body costs the event loop as much as many bytes do.
"""

from __future__ import annotations

import re

import h11
from h11._readers import ChunkedReader, ContentLengthReader
from h11._receivebuffer import ReceiveBuffer

FREE_CHUNKS = 64
"""Chunks of a body that may have any size."""
MIN_AVERAGE = 64
"""Bytes that the chunks of a body must have on average, beyond the first ``FREE_CHUNKS``; a long chunk makes up for
as many short ones at most.
"""
MAX_REST = 64 << 10
"""Bytes of a body that are read on after an early answer, so that the connection can be used again."""
HEAD_END = re.compile(rb"\n\r?\n")
MAX_HEAD = 64 << 10
MAX_TARGET = 8 << 10
"""Most bytes of a request's first line: method, path, query and version."""
REFUSALS = {
    400: (b"Bad Request", b"The request is not valid HTTP.", b"BadRequestError"),
    414: (b"URI Too Long", b"The request line has more than 8192 bytes.", b"RequestURITooLongError"),
    431: (
        b"Request Header Fields Too Large",
        b"The request has more header fields or bytes of them than the server takes.",
        b"RequestHeadersTooLargeError",
    ),
}


def make_refusal(status: int) -> bytes:
    """The whole response for what cannot be parsed, or is refused before it is."""
    phrase, message, kind = REFUSALS[status]
    body = b'{"error":{"message":"%b","type":"%b","param":null,"code":%d}}' % (message, kind, status)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    ) % (status, phrase, len(body), body)


class BoundedChunkedReader(ChunkedReader):
    """h11's reader of a chunked body, which refuses many small chunks and many trailers.

    Args:
        most_trailers: lines after the last chunk.
    """

    def __init__(self, most_trailers: int) -> None:
        super().__init__()
        self._most_trailers = most_trailers
        self._chunks = self._bytes = 0

    def __call__(self, buf: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        """The next piece of the body.

        Raises:
            LocalProtocolError: the chunks are too small or the trailers too many; h11 reports it as the client's error.
        """
        if self._reading_trailer and bytes(buf).count(b"\n") > self._most_trailers + 1:
            raise h11.LocalProtocolError("too many trailers")
        event = super().__call__(buf)
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes = min(self._bytes + len(event.data), MIN_AVERAGE * (self._chunks + FREE_CHUNKS))
            if self._chunks > FREE_CHUNKS and self._bytes < MIN_AVERAGE * (self._chunks - 1):
                raise h11.LocalProtocolError("chunks of less than 64 bytes on average")
        return event


class BoundedConnection(h11.Connection):
    """h11's server side of a connection, with bounds on chunks and trailers.

    Args:
        most_bytes: of an incomplete head.
        most_trailers: lines after the last chunk.
    """

    def __init__(self, most_bytes: int, most_trailers: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._most_trailers = most_trailers

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See ``h11.Connection``.

        Raises:
            RemoteProtocolError: what comes is no HTTP, or a request has two lengths, which a proxy in front may read
                otherwise.
        """
        event = super().next_event()
        if isinstance(event, h11.Request) and type(self._reader) is ChunkedReader:
            if any(name == b"content-length" for name, _ in event.headers):
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            self._reader = BoundedChunkedReader(self._most_trailers)
        return event

    def is_rest_cheap(self) -> bool:
        """True if what is missing of the request's body is short and has a known length."""
        return isinstance(self._reader, ContentLengthReader) and self._reader._remaining <= MAX_REST

    def reads_chunks(self) -> bool:
        """True while a chunked body is read, each of whose chunks costs as much as many bytes."""
        return self.their_state is h11.SEND_BODY and isinstance(self._reader, ChunkedReader)

    def reads_by_length(self) -> bool:
        """True while a body of a known length is read, whose bytes cost nothing but their number."""
        return self.their_state is h11.SEND_BODY and isinstance(self._reader, ContentLengthReader)
