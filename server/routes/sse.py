"""Server-sent events, and the client's disconnect, which ends any request.

A stream whose events are made from one piece of text after another.

Events of a stream that differ only in a few values: most do, and building a model for each costs ten times as
much.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trencadis.core.errors import DeadlineExceeded, TrencadisError
from trencadis.server.metrics.request_record_logs_and_metrics import RequestRecord
from trencadis.server.prompts.generation_stream import ChoicePiece, Generation, StreamWriter
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.base_request import ErrorResponse
from trencadis.server.routes.json_io import is_wide, off_event_loop

encode = msgspec.json.Encoder().encode
"""The JSON of a value, as models write it."""


def make_text_mark() -> str:
    """Makes a text that occurs nowhere else."""
    return secrets.token_hex(16)


def make_number_mark() -> int:
    """Makes a number that occurs nowhere else."""
    return 10**20 + secrets.randbelow(10**20)


class SseEventTemplate:
    """An encoded event with placeholders for a few values.

    Args:
        event: its bytes, with marks in place of values.
        marks: the bytes of each value's mark; it may occur several times, or not at all.
    """

    def __init__(self, event: bytes, marks: Sequence[bytes]) -> None:
        positions = sorted((at, i) for i, one in enumerate(marks) for at in _find_mark(event, one))
        parts, end = [], 0
        for at, i in positions:
            parts.append(event[end:at])
            end = at + len(marks[i])
        parts.append(event[end:])
        self._format = b"%b".join(part.replace(b"%", b"%%") for part in parts)
        order = [i for _, i in positions]
        self._pick: Callable[[Any], Any] | None = None
        if order != [*range(len(marks))]:
            self._pick = itemgetter(*order)

    def fill(self, *values: bytes) -> bytes:
        """Returns the event with ``values``, one for each mark."""
        return self._format % (values if self._pick is None else self._pick(values))


def _find_mark(event: bytes, one: bytes) -> list[int]:
    found, at = [], event.find(one)
    while at >= 0:
        found.append(at)
        at = event.find(one, at + len(one))
    return found


log = logging.getLogger("trencadis.server")
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
TIMEOUT_FLUSH_SECONDS = 5.0
"""Seconds in which a client must read the end of a stream whose time is up."""


def _encode_error(error: TrencadisError) -> bytes:
    return b"data: " + ErrorResponse.from_error(error).model_dump_json().encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The events of one API's streams for errors, the end, and keep-alive.

    Args:
        failure: makes the event for an error.
        done: sent at the end, after an error too.
        keep_alive: sent while the stream is silent.
    """

    failure: Callable[[TrencadisError], bytes] = _encode_error
    done: bytes = DONE
    keep_alive: bytes = KEEP_ALIVE


CHAT_STREAM_FORMAT = StreamFormat()


class TimedStreamWriter(StreamWriter, Protocol):
    """A writer that notes when it was last written to."""

    last_written: float
    """``time.monotonic`` of the last write."""


class WritableConnection(Protocol):
    """A connection that can be written to directly, bypassing the layers of the app."""

    def get_chunk_writer(self, record: RequestRecord) -> TimedStreamWriter | None:
        """Returns a writer of chunks of the response that has begun; its bytes are counted in ``record``."""
        ...


class ClientGone(Exception):
    """The client has closed its connection."""


def encode_event(value: BaseModel) -> bytes:
    """Encodes one event, with only the fields that were set."""
    return b"data: " + value.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of ``work``, which is cancelled if the client disconnects.

    Raises:
        ClientGone: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel_all(task, watch)


class EventStream(Response):
    """Sends events as they come, then the end marker of the stream; an error becomes an event before it.

    Args:
        events: encoded by ``encode_event``.
        keep_alive: seconds of silence after which the stream sends a comment; 0: never.
        done: called once, however the stream ends.
        form: what the stream says besides the events.
        set_writer: has events that are ready while the stream waits for one written to the connection itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        keep_alive: float = 0.0,
        done: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
        form: StreamFormat = CHAT_STREAM_FORMAT,
        set_writer: Callable[[StreamWriter], None] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive
        self._done = done
        self._form = form
        self._set_writer = set_writer
        self._writer: TimedStreamWriter | None = None
        self._last_sent = 0.0
        self._record: RequestRecord | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the end or the client's disconnect, whichever comes first."""
        self._record = scope.get("trencadis.record")
        stream = asyncio.create_task(self._stream(send, scope))
        watch = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({stream, watch}, return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                with suppress(OSError):
                    stream.result()
        finally:
            try:
                await _cancel_all(stream, watch)
                await self._close()
            finally:
                if self._done is not None:
                    self._done()

    async def _stream(self, send: Send, scope: Scope) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._set_writer is not None:
            # The second path: deltas between the first and the last of a choice bypass this task, which would cost
            # 1.8 times the CPU time a token (benchmarks.host.stream). The paths meet where the task waits.
            self._writer = get_connection_writer(scope)
            if self._writer is not None:
                self._set_writer(self._writer)
        try:
            async with asyncio.timeout_at(None if self._record is None else self._record.deadline) as timer:
                if self._record is not None:
                    self._record.timer = timer  # the request middleware's timer has been stopped
                async with aclosing(self._with_error_event()) as chunks, self._keep_alive_comments(send):
                    async for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        self._last_sent = time.monotonic()
                if not timer.expired():
                    timer.reschedule(None)
                await self._finish(send)
        except TimeoutError:
            if not timer.expired():
                raise
            # Ends the engine's work first: a client that does not read must not keep it running.
            await self._close()
            async with asyncio.timeout(TIMEOUT_FLUSH_SECONDS):
                late = self._encode_failure(DeadlineExceeded("The request did not end within its time."))
                await send({"type": "http.response.body", "body": late, "more_body": True})
                await self._finish(send)

    async def _finish(self, send: Send) -> None:
        if self._form.done:
            await send({"type": "http.response.body", "body": self._form.done, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _close(self) -> None:
        """Ends the source of the events; a second call does nothing."""
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()

    def _encode_failure(self, error: TrencadisError) -> bytes:
        if self._record is not None:
            self._record.error = error.type
        return self._form.failure(error)

    async def _with_error_event(self) -> AsyncGenerator[bytes]:
        """Yields the events, then one for an error among them. Errors of sending are not reported: the client has
        gone.
        """
        try:
            async for chunk in self._events:
                yield chunk
            return
        except TrencadisError as error:
            failure = error
        except Exception:
            log.exception("a stream failed")
            failure = TrencadisError("Internal server error.")
        yield self._encode_failure(failure)

    @asynccontextmanager
    async def _keep_alive_comments(self, send: Send) -> AsyncIterator[None]:
        """Sends keep-alive comments while the stream is silent. One task serves all events, which is cheaper than a
        timer each.
        """
        if self._keep_alive <= 0:
            yield
            return
        self._last_sent = time.monotonic()
        speaking = asyncio.create_task(self._send_comments(send))
        try:
            yield
        finally:
            await _cancel_all(speaking)

    async def _send_comments(self, send: Send) -> None:
        while True:
            if self._writer is not None:
                self._last_sent = max(self._last_sent, self._writer.last_written)
            rest = self._last_sent + self._keep_alive - time.monotonic()
            if rest > 0:
                await asyncio.sleep(rest)
                continue
            self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": self._form.keep_alive, "more_body": True})


def get_connection_writer(scope: Scope) -> TimedStreamWriter | None:
    """Returns a writer that bypasses the layers of the app, which do not change bodies, and writes to the connection.

    None if there is no such connection, or it does not use HTTP/1.1 chunks.
    """
    known, record = scope.get("trencadis.connection"), scope.get("trencadis.record")
    if known is None or record is None:
        return None
    connection: WritableConnection | None = known()
    return None if connection is None else connection.get_chunk_writer(record)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel_all(*tasks: asyncio.Future[T] | asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class PieceStream:
    """The stream of one request; subclasses make its events.

    Args:
        generation: the source of its pieces, if there is only one.
        top: log-probabilities reported with each token; -1: all.
    """

    def __init__(self, generation: Generation | None, top: int | None = None) -> None:
        self._generation = generation
        self._apart = is_wide(top)
        """True if events are made in a thread."""

    def make_events(self, index: int, piece: TextPiece) -> bytes:
        """Makes the events of a piece of choice ``index``; empty while there is nothing to send."""
        raise NotImplementedError

    def make_final_events(self) -> bytes:
        """Makes the events once all choices have ended."""
        return b""

    def stream_pieces(self) -> AsyncGenerator[ChoicePiece]:
        """Yields the pieces, each with the index of its choice in the answer."""
        assert self._generation is not None
        return self._generation.stream_pieces()

    async def stream_events(self) -> AsyncGenerator[bytes]:
        """Yields all events; they begin with the first piece, so that an error before it is a plain HTTP error."""
        async with aclosing(self.stream_pieces()) as pieces:
            async for index, piece in pieces:
                data = await self._make_apart(index, piece) if self._apart else self.make_events(index, piece)
                if data:
                    yield data
        data = self.make_final_events()
        if data:
            yield data

    async def _make_apart(self, index: int, piece: TextPiece) -> bytes:
        return await off_event_loop.run(lambda check: self.make_events(index, piece))

    def set_writer(self, writer: StreamWriter) -> None:
        """Writes events to ``writer`` at once while the reader of ``stream_events`` waits; see
        ``Generation.set_writer``.
        """
        if self._generation is not None and not self._apart:
            self._generation.set_writer(writer, self.make_events)
