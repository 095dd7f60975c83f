"""uvicorn's HTTP connection with limits of memory and time.

Stream chunks are written directly to the connection, bypassing the ASGI layers, whose cost per token exceeds the system
call's. Only events between the head of a response and its end are written this way. They keep their order with those
that pass through the layers, because the task that writes the latter waits for its next piece meanwhile
(``Generation.set_writer``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from trencadis.server.http.h11_body_bounds import HEAD_END, MAX_HEAD, MAX_TARGET, BoundedConnection, make_refusal
from trencadis.server.http.pending_request_heads_by_tenant import SharedLimits
from trencadis.server.metrics.request_record_logs_and_metrics import RequestRecord

MAX_READ = 16 << 10
"""Bytes of heads and of a chunked body that are taken in one pass of the event loop."""
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
OVERLOADED_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
GRACE = 1.0
"""Seconds that an idle connection is kept beyond ``--timeout-keep-alive``. Clients keep connections for five
seconds, as the server does: one reused in the last moment would be reset, so the client's limit has to expire first.
"""
DISCONNECT_CHECKS = (0.02, 0.1, 0.25, 0.5)
"""Seconds between checks of a client that has closed its side; the last value repeats."""
DROP_SECONDS = 2.0
"""Seconds for which bytes of a client are dropped that was answered before they came."""


class LimitedH11Protocol(H11Protocol):
    """A connection under the limits of ``shared``."""

    _held = 0
    _unread = 0
    """Reads of a chunked body that wait for their pass of the event loop."""
    _completing = False
    """True while the end of an answer begins the next request, whose bytes are there already."""
    _is_deferred = False
    """True while such a request waits for its pass of the event loop."""
    _has_eof = False
    """True if the client closed its side while such reads waited."""
    _dropping = False
    """Whether all that comes is dropped without being parsed, until the client closes or a moment has passed."""
    _usual_read = 0
    _ended = False
    """True if the client has closed its side."""
    _timer: asyncio.TimerHandle | None = None
    _waits: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
    """The event that the timer limits: a head, or the rest of a body that is discarded."""
    _look: asyncio.TimerHandle | None = None
    on_lost: Callable[[], None] | None = None
    """Called when the connection ends while its request waits for admission."""

    def __init__(self, shared: SharedLimits, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # The request middleware writes access lines, with its own data.
        self.access_log = False
        self._max_head = self.config.h11_max_incomplete_event_size or MAX_HEAD
        self.conn = self._bounded = BoundedConnection(self._max_head, shared.most_lines)
        self._shared = shared
        if self.timeout_keep_alive:
            self.timeout_keep_alive += GRACE  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the head of the first request."""
        super().connection_made(transport)
        self._usual_read = getattr(transport, "max_size", 0)
        self._bound_reads()
        self._wait(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Releases the bytes and timers of the connection."""
        self._hold(0)
        self._wait(None)
        if self._look is not None:
            self._look.cancel()
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.disconnected or not self.cycle.response_complete
        self._shared.lost_connections.put(self.loop, functools.partial(self._end, exc))

    def _end(self, exc: Exception | None) -> None:
        """Ends the request of a connection that is lost."""
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Handles bytes of a head, a body or pipelined requests."""
        shared = self._shared
        if self._dropping:
            return
        # Bytes that follow reads which still wait must wait in the same queue: the other one may be served first.
        is_new = not self._unread and self._is_idle()
        if is_new and not shared.may_begin(self.loop) and shared.held + len(data) <= shared.bound:
            self._defer(data)
            return
        if self._unread or self._bounded.reads_chunks():
            self._unread += 1
            self.flow.pause_reading()
            shared.chunks.put(self.loop, functools.partial(self._take_chunks, data))
            return
        super().data_received(data)
        self._charge_pending_bytes()

    def _defer(self, data: bytes) -> None:
        """Keeps bytes for the next pass of the event loop."""
        self._unset_keepalive_if_required()
        self.flow.pause_reading()
        self._shared.deferred.put((self, data), data)
        self._hold(self._held + len(data))

    def _take_chunks(self, data: bytes) -> None:
        """Takes bytes of a chunked body that came in an earlier pass of the event loop."""
        self._unread -= 1
        self.resume(data)
        if self._has_eof and not self._unread and not self.transport.is_closing() and not self.eof_received():
            self.transport.close()

    def resume(self, data: bytes) -> None:
        """Takes bytes that came in an earlier pass of the event loop."""
        if self.transport.is_closing() or self._dropping:
            return
        try:
            self._is_deferred = False
            self.flow.resume_reading()
            if data:
                super().data_received(data)
            else:
                self.handle_events()
            self._charge_pending_bytes()
        except Exception:
            # As asyncio does after an error in data_received.
            self.transport.abort()
            raise

    def handle_events(self) -> None:
        """Begins the requests whose heads have arrived; their scopes have a reference to this connection."""
        before = self.cycle
        if self._completing and (waiting := self.conn.trailing_data[0]) and not self._shared.may_begin(self.loop):
            self._is_deferred = True
            self._unset_keepalive_if_required()
            self.flow.pause_reading()
            self._shared.deferred.put((self, b""), waiting)
            return
        if self.conn.their_state is h11.IDLE and (refusal := self._check_head()):
            self._shared.count_refusal(*refusal)
            self._refuse_head(refusal[0])
            return
        super().handle_events()
        self._bound_reads()
        if self.cycle is not before:
            self.cycle.transport = cast("asyncio.Transport", AnswerTransport(self.transport, self.close_after_answer))
            # A weak reference, to avoid a cycle for the garbage collector.
            cast("dict[str, Any]", self.cycle.scope)["trencadis.connection"] = weakref.ref(self)

    def _check_head(self) -> tuple[int, str] | None:
        """Status and reason of a refusal of the buffered head, which is not parsed yet; None if it is taken."""
        data = self.conn.trailing_data[0].lstrip(b"\r\n")
        end = HEAD_END.search(data)
        if (end.end() if end else len(data)) >= self._max_head:
            return 431, "bytes"
        line = data.find(b"\n", 0, MAX_TARGET + 1)
        if line < 0:
            return (414, "request line") if len(data) > MAX_TARGET else None
        if data.count(b"\n", line + 1, end.start() if end else len(data)) > self._shared.most_lines:
            return 431, "fields"
        return None

    def _refuse_head(self, status: int) -> None:
        """Answers a head that is not parsed, and closes the connection."""
        self.transport.write(make_refusal(status))
        self._drop_rest()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, in our form, and closes the connection; an answer that has begun is cut off."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._shared.count_refusal(400, "http")
        if self.cycle is not None:
            # Its task must not write after this answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse_head(400)

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: Java's client asks for HTTP/2 with each connection, and the request is answered as it is."""

    def close_after_answer(self) -> None:
        """Closes the connection after an answer whose client wants no other one, and may still send its body."""
        if self.conn.their_state is h11.SEND_BODY and not self._dropping:
            self._drop_rest()
        else:
            self.transport.close()

    def _drop_rest(self) -> None:
        """Ends this side of the connection after an early answer. What comes is dropped for ``DROP_SECONDS``, because
        the client's system would throw the answer away if the connection were closed with unread bytes.
        """
        self._dropping = True
        self._unset_keepalive_if_required()
        self._hold(0)
        self._wait(None)
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client may have gone, although its last bytes are read only now
                self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(DROP_SECONDS, self.transport.close)

    def _bound_reads(self) -> None:
        """Sets how many bytes one pass of the event loop reads: a body of a known length alone may have many."""
        if self._usual_read:
            transport = cast("Any", self.transport)
            transport.max_size = self._usual_read if self._bounded.reads_by_length() else MAX_READ

    def get_chunk_writer(self, record: RequestRecord) -> ChunkWriter | None:
        """Returns a writer for chunks of the response that has begun; None if it is not chunked.

        HTTP/1.1 sends bodies of unknown length in chunks, except for HEAD requests.
        """
        cycle = self.cycle
        if self.conn.our_state is not h11.SEND_BODY or self.scope["http_version"] != "1.1":
            return None
        if self.scope["method"] == "HEAD" or cycle.disconnected:
            return None
        return ChunkWriter(self.transport, self.flow, cycle, record)

    def on_response_complete(self) -> None:
        """Closes the connection of a client that has closed its side, since no other request follows."""
        if self._dropping:
            return
        self._completing = True
        try:
            super().on_response_complete()
        finally:
            self._completing = False
        if self._is_deferred:
            self._hold(len(self.conn.trailing_data[0]))
            return
        if self._dropping or self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY and not self._bounded.is_rest_cheap():
            self._drop_rest()
            return
        self._charge_pending_bytes()
        if self._ended and self._is_idle():
            self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _charge_pending_bytes(self) -> None:
        """Counts the buffered bytes of a request that has not begun, and starts the matching timeout."""
        if self._dropping or self.transport.is_closing():
            return
        state = self.conn.their_state
        held = len(self.conn.trailing_data[0]) if state in (h11.IDLE, h11.DONE) else 0
        self._hold(held)
        if held and self._shared.held > self._shared.bound:
            self._shared.log_connection_limit()
            self._refuse(OVERLOADED_RESPONSE)
        elif state is h11.IDLE and held:
            self._wait(h11.IDLE)
        elif state is h11.SEND_BODY and self._is_idle():
            self._wait(h11.SEND_BODY)
        else:
            self._wait(None)

    def _hold(self, count: int) -> None:
        self._shared.held += count - self._held
        self._held = count

    def _wait(self, what: type[h11.IDLE] | type[h11.SEND_BODY] | None) -> None:
        """Starts the timer, unless it already runs for ``what``; None stops it."""
        if what is self._waits and not self._dropping:
            return
        self._waits = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None and self._shared.seconds:
            self._timer = self.loop.call_later(self._shared.seconds, self._on_timeout)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, unless a request has just arrived, which would be reset."""
        if self._has_more():
            self.timeout_keep_alive_task = self.loop.call_later(GRACE, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def _has_more(self) -> bool:
        """Returns True if the system has bytes that the event loop has not read yet."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or self.transport.is_closing() or not self.transport.is_reading():
            return False
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _on_timeout(self) -> None:
        if self._waits is h11.IDLE and not self._held and self._has_more():
            self._timer = self.loop.call_later(GRACE, self._on_timeout)
            return
        if self._waits is h11.IDLE and self._held:
            self._refuse(TIMEOUT_RESPONSE)
        else:
            self.transport.close()

    def _refuse(self, answer: bytes) -> None:
        if self._is_idle():
            self.transport.write(answer)
        self._hold(0)
        self.transport.close()

    # --- clients that close their side ---

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answers a client that closes its side after a complete request.

        A client that has gone looks the same until the server sends something; then its system resets the connection.
        So the server sends an interim response, which HTTP/1.1 clients ignore, and checks the socket. TLS has no
        half-closed connections.
        """
        if self.scheme == "https" or self._dropping:
            return None
        if self._unread:
            self._has_eof = True
            return True
        if self._is_idle() or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return None
        if not self._ended:
            self._ended = True
            if not self.cycle.response_started:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                self.transport.write(self.conn.send(interim))
            self._check_disconnect_later(0)
        return True

    def _check_disconnect_later(self, times: int) -> None:
        self._look = self.loop.call_later(
            DISCONNECT_CHECKS[min(times, len(DISCONNECT_CHECKS) - 1)], self._abort_if_disconnected, times
        )

    def _abort_if_disconnected(self, times: int) -> None:
        if self.transport.is_closing() or self._is_idle():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._check_disconnect_later(times + 1)


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
