"""Messages between the front process and an API process: frames, and questions with their replies, both ways.

Frames are those of ``core/process/engine_messages.py``; payloads have any size. API processes use an engine's messages
for requests: Add, Abort, Media, VocabularyPart. The messages here are sent in addition.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from trencadis.core.errors import TrencadisError, Unavailable, from_status
from trencadis.core.json_types import Json, JsonObject
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta
from trencadis.server.config.resolve_settings import Settings


class ServeOrder(msgspec.Struct, tag=True):
    """Down, first message: what to serve, as which of ``count`` processes, and over which descriptors.

    Args:
        replicas: number of engines.
    """

    settings: Settings
    index: int
    count: int
    replicas: int
    listener: int
    table: int


class ReplicaState(msgspec.Struct, frozen=True):
    """State of one engine; the names are those of ``EngineClient``."""

    phase: str = "starting"
    accepting: bool = False
    healthy: bool = False
    ready: bool = False
    failing: bool = False
    stopping: bool = False
    restarts: int = 0
    sleep_level: int = 0
    sleep_operation: str = ""
    progress: engine_messages.Phase | None = None


class EngineStates(msgspec.Struct, tag=True):
    """Down: the engines' states, and their counters without the lists of new entries."""

    states: list[ReplicaState]
    stats: list[engine_messages.EngineStats]


class ReplicaInfo(msgspec.Struct, tag=True):
    """Down: the info that engine ``replica`` reported when ready, and its planned shapes; sent when they change."""

    replica: int
    info: engine_messages.EngineInfo | None
    plan: engine_messages.GraphPlan | None


class RequestRouted(msgspec.Struct, tag=True):
    """Down: request ``id`` was sent to engine ``replica`` of several."""

    id: str
    replica: int


class DeltaBatch(msgspec.Struct, tag=True):
    """Down: deltas of requests of this process."""

    items: list[Delta]


class ReloadOrder(msgspec.Struct, tag=True):
    """Down: read keys and certificates again."""


class LeaveOrder(msgspec.Struct, tag=True):
    """Down: accept no more connections, finish the answers within ``seconds``, then exit."""

    seconds: int


class ApiReady(msgspec.Struct, tag=True):
    """Up: the app is built and accepts connections.

    Args:
        max_model_len: from the configuration, before the engine reports its own; determines the sizes of histograms.
    """

    max_model_len: int


class ApiFailed(msgspec.Struct, tag=True):
    """Up: the process cannot start; ``code`` 2: the configuration is wrong."""

    message: str
    code: int


class FrontQuestion(msgspec.Struct, tag=True):
    """Both ways: a question ``method`` with arguments; a ``FrontReply`` with the same number follows."""

    number: int
    method: str
    arguments: JsonObject = {}


class FrontReply(msgspec.Struct, tag=True):
    """Both ways: the answer is the payload; or ``status`` and ``message`` of an error."""

    number: int
    status: int = 0
    message: str = ""
    retry_after: int | None = None


Down = (
    ServeOrder
    | EngineStates
    | ReplicaInfo
    | RequestRouted
    | DeltaBatch
    | engine_messages.NeedMedia
    | ReloadOrder
    | LeaveOrder
    | FrontQuestion
    | FrontReply
)
Requests = (
    engine_messages.Add
    | engine_messages.Abort
    | engine_messages.Media
    | engine_messages.MediaFailed
    | engine_messages.VocabularyPart
)
Up = (
    ApiReady
    | ApiFailed
    | Requests
    | engine_messages.ResetPrefixCache
    | engine_messages.ResetEncoderCache
    | FrontQuestion
    | FrontReply
)

_encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def make_frame(message: msgspec.Struct, payload: bytes | memoryview = b"") -> bytes:
    """Encodes header and message; the caller writes the payload after it."""
    body = _encoder.encode(message)
    return engine_messages.HEADER.pack(len(body), len(payload)) + body


log = logging.getLogger("trencadis.server")

M = TypeVar("M", bound=msgspec.Struct)
GONE = "A process of this server ended; please retry."
MOST_UNSENT = 1 << 20
"""Bytes that may wait to be sent before a sender waits."""


class Channel(Generic[M]):
    """One end of the connection.

    Args:
        decode: decodes received messages.
        receive: called with each message that is neither question nor reply, and its payload; awaited if it returns an
        awaitable.
        answer: called with a question; returns the payload of its reply, or raises a TrencadisError.
    """

    def __init__(
        self,
        sock: socket.socket,
        decode: Callable[[bytes], M],
        receive: Callable[[M, bytes], Awaitable[None] | None],
        answer: Callable[[str, JsonObject], Awaitable[bytes]],
    ) -> None:
        self._sock, self._decode, self._receive, self._answer = sock, decode, receive, answer
        self.writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """Connects the socket to this event loop; frames can be written from now on."""
        self._reader, self.writer = await asyncio.open_connection(sock=self._sock)
        self.writer.transport.set_write_buffer_limits(MOST_UNSENT)

    async def run(self) -> None:
        """Reads until the other end has closed."""
        reader = self._reader
        try:
            while True:
                size, extra = engine_messages.HEADER.unpack(await reader.readexactly(engine_messages.HEADER.size))
                message = self._decode(await reader.readexactly(size))
                payload = await reader.readexactly(extra) if extra else b""
                match message:
                    case FrontQuestion():
                        self._spawn(self._reply(message))
                    case FrontReply():
                        self._settle(message, payload)
                    case _:
                        waits = self._receive(message, payload)
                        if waits is not None:
                            await waits
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._close()

    def _close(self) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Unavailable(GONE, retry_after=1))
                future.exception()  # marks the error as retrieved, since its waiter may be gone
        self._asked.clear()
        for task in self._tasks:
            task.cancel()
        if self.writer is not None:
            self.writer.transport.abort()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- questions ---

    async def ask(self, method: str, **given: Json) -> bytes:
        """Asks the other end and returns its answer.

        Raises:
            TrencadisError: the other end raised it.
            Unavailable: the other end has closed.
        """
        if self.writer is None or self.writer.is_closing():
            raise Unavailable(GONE, retry_after=1)
        n = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[n] = future
        try:
            await self.send(FrontQuestion(n, method, given))
            return await future
        finally:
            self._asked.pop(n, None)

    async def _reply(self, question: FrontQuestion) -> None:
        try:
            payload = await self._answer(question.method, question.arguments)
        except TrencadisError as error:
            self.write(FrontReply(question.number, error.status, error.message, error.retry_after))
        except Exception:
            log.exception("the question %s could not be answered", question.method)
            self.write(FrontReply(question.number, 500, "Internal server error."))
        else:
            await self.send(FrontReply(question.number), payload)

    def _settle(self, reply: FrontReply, payload: bytes) -> None:
        future = self._asked.pop(reply.number, None)
        if future is None or future.done():
            return
        if reply.status:
            error = from_status(reply.status, reply.message)
            error.retry_after = reply.retry_after
            future.set_exception(error)
        else:
            future.set_result(payload)

    # --- frames ---

    def write(self, message: msgspec.Struct, payload: bytes | memoryview = b"") -> None:
        """Writes one frame; does nothing if the other end has closed."""
        if self.writer is None or self.writer.is_closing():
            return
        self.writer.write(make_frame(message, payload))
        if payload:
            self.writer.write(payload)

    def is_full(self) -> bool:
        """Returns True if more than ``MOST_UNSENT`` bytes wait to be sent, since the other end does not read."""
        return self.writer is not None and self.writer.transport.get_write_buffer_size() > MOST_UNSENT

    async def wait_for_room(self) -> None:
        """Waits while the socket is full; returns if it is closed."""
        if self.writer is not None:
            try:
                await self.writer.drain()
            except OSError:
                log.debug("the other end broke while a frame was sent")

    async def send(self, message: msgspec.Struct, payload: bytes | memoryview = b"") -> None:
        """Writes one frame and waits while the socket is full."""
        self.write(message, payload)
        await self.wait_for_room()
