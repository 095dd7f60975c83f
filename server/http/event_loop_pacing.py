"""Limits of what one connection costs the event loop: chunks and trailers of bodies, and heads that are not read yet.

Each chunk and each trailer of a body costs the event loop as much as many bytes do. Calls that come in crowds are
spread over its passes.

Unread request heads are served round-robin by tenant, which is found by the key in each head. A flood may write
thousands of heads at once. Reading one, checking its key and queueing its request takes half a millisecond; finding a
key among the bytes takes a hundredth of that, so other requests need not wait for a flood.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import h11
from h11._readers import ChunkedReader, ContentLengthReader
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from trencadis.server.metrics.request_record import RequestRecord
from trencadis.server.tenants.tenant_registry import MAX_KEYS, TenantRegistry

log = logging.getLogger("trencadis.server")

FREE_CHUNKS = 64
"""Chunks of a body that may have any size."""
MIN_AVERAGE = 64
"""Bytes that the chunks of a body must have on average, beyond the first ``FREE_CHUNKS``; a long chunk makes up for
as many short ones at most.
"""
MAX_REST = 64 << 10
"""Bytes of a body that are read on after an early answer, so that the connection can be used again."""
MAX_READ = 16 << 10
"""Bytes of heads and of a chunked body that are taken in one pass of the event loop."""


HEADS = 32 << 20
"""Maximum bytes of unfinished request heads and of pipelined requests, on all connections together."""
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
OVERLOADED_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
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


class PacedCalls:
    """Runs calls in order, at most ``most`` of them in one pass; other callbacks run in between."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedules ``call`` for one of the next passes."""
        self._waiting.append(call)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(self._most, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())  # separately, so that an error in one does not stop the others
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            loop.call_soon(self._pass, loop)


T = TypeVar("T")
MAX_SEARCHED = 16 << 10
"""Maximum bytes in which a key is searched."""
KEY = re.compile(rb"\r\n(?:x-api-key:|authorization:[ \t]*bearer[ \t])[ \t]*([^\r\n]*)", re.IGNORECASE)


def find_keys(data: bytes) -> list[bytes]:
    """Extracts the first ``MAX_KEYS`` API keys in an unparsed HTTP head; they are not verified."""
    end = data.find(b"\r\n\r\n", 0, MAX_SEARCHED)
    found = KEY.finditer(data, 0, end if end >= 0 else MAX_SEARCHED)
    return [one[1].rstrip() for one in itertools.islice(found, MAX_KEYS)]


def find_tenant_name(tenants: TenantRegistry, data: bytes) -> str:
    """Returns the name of the tenant whose key is in an unparsed HTTP head; "" without a valid key."""
    account = tenants.find(find_keys(data))
    return "" if account is None else account.tenant.name


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    """Waiting items of one tenant; ``next`` alternates between the oldest and the newest."""

    some: deque[T] = field(default_factory=deque)
    newest: bool = False

    def next(self) -> T:
        self.newest = not self.newest
        return self.some.popleft() if self.newest else self.some.pop()


class PendingHeads(Generic[T]):
    """Waiting items by tenant name from ``get_tenant``; a single name without it."""

    def __init__(self) -> None:
        self.get_tenant: Callable[[bytes], str] = lambda data: ""
        self._queues: dict[str, _TenantQueue[T]] = {}
        """Queues in round-robin order."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, one: T, data: bytes) -> None:
        """Adds ``one``, whose head begins with ``data``."""
        self._queues.setdefault(self.get_tenant(data), _TenantQueue()).some.append(one)
        self._count += 1

    def take(self) -> T:
        """Removes and returns the next one in round-robin order."""
        name = next(iter(self._queues))
        line = self._queues.pop(name)
        one = line.next()
        if line.some:
            self._queues[name] = line
        self._count -= 1
        return one


STARTS_PER_PASS = 2
"""Maximum requests that begin in one pass of the event loop. Thousands of clients may write at once, and each head
delays all answers; further bytes wait for the next pass.
"""
ENDS_PER_PASS = 8
"""Maximum requests that end in one pass of the event loop because their clients have gone. Each takes a tenth of a
millisecond, and all those of a load balancer that ends go at once.
"""


class Resumable(Protocol):
    """A connection whose bytes may wait for another pass of the event loop."""

    def resume(self, data: bytes) -> None:
        """Takes bytes that came in an earlier pass; none: those that it has itself."""
        ...


@dataclass
class SharedLimits:
    """Limits that all connections of a server share.

    Args:
        seconds: in which the head of a request must arrive, from the connection or its first byte on; 0: no limit.
            Also the time for which a body is read and dropped after the answer.
        bound: most bytes of requests that have not begun.
        begun: requests that have begun in this pass of the event loop.
        deferred: connections with the bytes that wait for the next pass. Round-robin over tenants, and of one tenant
            alternately the one that waits longest and the one that came last, which may be another client's than a
            flood's.
        lost_connections: the ends of connections whose clients have gone.
        chunks: reads of chunked bodies, one in each pass.
        most_lines: lines of a head below the first one; a folded field has several.
        count_refusal: called with (status, reason) of each head that is refused before it is parsed.
    """

    seconds: float = 20.0
    bound: int = HEADS
    held: int = 0
    said: float = -60.0
    begun: int = 0
    deferred: PendingHeads[tuple[Resumable, bytes]] = field(default_factory=PendingHeads)
    lost_connections: PacedCalls = field(default_factory=lambda: PacedCalls(ENDS_PER_PASS))
    chunks: PacedCalls = field(default_factory=lambda: PacedCalls(1))
    most_lines: int = 256
    count_refusal: Callable[[int, str], None] = lambda status, reason: None

    def may_begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns True if another request may begin in this pass."""
        if not self.begun:
            loop.call_soon(self._run_pass, loop)
        self.begun += 1
        return self.begun <= STARTS_PER_PASS and not self.deferred

    def _run_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins the next requests, each separately, so that an error in one does not stop the others."""
        self.begun = 0
        if self.deferred:
            self._begin(loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        some = [self.deferred.take() for _ in range(min(len(self.deferred), STARTS_PER_PASS))]
        self.begun = len(some)
        for connection, data in some:
            loop.call_soon(connection.resume, data)
        loop.call_soon(self._run_pass, loop)

    def log_connection_limit(self) -> None:
        """Logs, at most once a minute, that the limit on bytes of pending heads is reached."""
        if time.monotonic() - self.said >= 60.0:
            self.said = time.monotonic()
            log.warning("unfinished request heads hold %d bytes: the server refuses more", self.bound)


class ChunkWriter:
    """Writes chunks of the response of ``cycle``, whose head is written, and which has no length.

    Args:
        record: counts their bytes.
    """

    __slots__ = ("_closing", "_cycle", "_flow", "_record", "_write", "last_written")

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, cycle: RequestResponseCycle, record: RequestRecord
    ) -> None:
        self._write, self._closing = transport.write, transport.is_closing
        self._flow, self._cycle, self._record = flow, cycle, record
        self.last_written = time.monotonic()

    def is_ready(self) -> bool:
        """True while the client is connected and the transport's buffer is not full."""
        return not (self._flow.write_paused or self._cycle.disconnected or self._closing())

    def write(self, data: bytes) -> None:
        """Writes one chunk."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        self._record.sent += len(data)
        self.last_written = time.monotonic()


class AnswerTransport:
    """The part of a transport that a request's task uses to write its answer.

    Args:
        transport: writes the bytes.
        close: called instead of ``transport.close``.
    """

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close
