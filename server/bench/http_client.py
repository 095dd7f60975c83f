"""An HTTP/1.1 client that records arrival times and parses data later, so that its own work does not distort what it
measures.

A general client takes a fraction of a millisecond for each piece of a stream, which delays all other streams. This one
records the time and stores the bytes; JSON is parsed when the answer has ended.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trencadis.core.json_types import Json

LARGEST_HEAD = 1 << 16


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Times are ``time.perf_counter`` seconds.

    Args:
        started: when it could have been sent; ``sent``: when it was, after waiting for a free slot.
        pieces: (time, bytes) of each received piece of the body.
    """

    started: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    error: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.pieces)


class ResponseReader:
    """Parses the bytes of one response; ``done`` once it is complete.

    Raises:
        ValueError: the bytes are not an HTTP/1.1 response.
    """

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keep = True
        self._head = bytearray()
        self._left: int | None = None
        """Bytes of the body, or of the chunk, that are still missing; None: until the connection ends."""
        self._chunked = False
        self._rest = b""
        self._last = False

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the pieces of the body that ``data`` contains."""
        if not self.status:
            self._head += data
            head, mark, data = bytes(self._head).partition(b"\r\n\r\n")
            if not mark:
                if len(self._head) > LARGEST_HEAD:
                    raise ValueError("the head of the response does not end")
                return []
            status = self._read_head(head)
            if status == 100:
                self._head = bytearray()
                return self.feed(data) if data else []
            self.status = status
        if self._chunked:
            return self._read_chunks(data)
        if self._left is None:
            return [data] if data else []
        if len(data) > self._left:
            raise ValueError("the body is longer than announced")
        self._left -= len(data)
        self.done = self._left == 0
        return [data] if data else []

    def end(self) -> None:
        """Handles the end of the connection.

        Raises:
            ValueError: the response is not complete.
        """
        if self.status and not self._chunked and self._left is None:
            self.done = True
        if not self.done:
            raise ValueError("the connection ended in the middle of the response")

    def _read_head(self, head: bytes) -> int:
        """Parses the head to find out how the body is sent; returns the status."""
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise ValueError("this is no HTTP response")
        status = int(parts[1])
        named = {}
        for line in lines:
            name, _, value = line.partition(b":")
            named[name.strip().lower()] = value.strip()
        self._chunked = named.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = named.get(b"content-length")
        self._left = 0 if self._chunked else (int(length) if length is not None else None)
        if status in (204, 304):
            self._left = 0
        self.keep = parts[0] != b"HTTP/1.0" and named.get(b"connection", b"").lower() != b"close"
        self.done = not self._chunked and self._left == 0 and status != 100
        return status

    def _read_chunks(self, data: bytes) -> list[bytes]:
        """Returns the pieces of a chunked body; incomplete sizes and ends wait in ``_rest``."""
        found = []
        data, self._rest = self._rest + data, b""
        while data and not self.done:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                found.append(piece)
                continue
            # Between chunks: the end of the one before, then a line with a size.
            line, mark, rest = data.removeprefix(b"\r\n").partition(b"\r\n")
            if not mark:
                self._rest = data
                break
            if self._last:
                self.done = not line
                data = b"\r\n" + rest if line else rest
                continue
            self._left = int(line.partition(b";")[0], 16)
            data = rest
            if self._left == 0:
                self._last = True
                data = b"\r\n" + rest
                self._ends_at_once(data)
                if self.done:
                    break
        return found

    def _ends_at_once(self, data: bytes) -> None:
        """Sets ``done`` if the usual end, an empty line without trailers, has already arrived."""
        self.done = data.startswith(b"\r\n\r\n")


class BenchConnection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self, owner: BenchClient) -> None:
        self.owner = owner
        self.transport: asyncio.Transport | None = None
        self.reader: ResponseReader | None = None
        self.exchange = Exchange()
        self.ended: asyncio.Future[None] | None = None
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Stores data with its arrival time."""
        now = time.perf_counter()
        if self.reader is None:
            return
        try:
            self.exchange.pieces += [(now, piece) for piece in self.reader.feed(data)]
        except ValueError as error:
            self._finish(str(error))
            return
        if self.reader.done:
            self._finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the other side has closed, or the network has failed."""
        self.transport = None
        self.owner.forget(self)
        if self.reader is not None:
            try:
                self.reader.end()
            except ValueError as error:
                self._finish(str(error))
            else:
                self._finish("")

    def _finish(self, error: str) -> None:
        reader, self.reader = self.reader, None
        assert reader is not None
        self.exchange.status, self.exchange.error = reader.status, error
        self.exchange.ended = time.perf_counter()
        self.used = True
        if error or not reader.keep:
            self.close()
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Closes the connection."""
        if self.transport is not None:
            self.transport.close()

    async def run(self, request: bytes, exchange: Exchange) -> None:
        """Sends one request and waits for the whole response."""
        assert self.transport is not None
        self.exchange, self.reader = exchange, ResponseReader()
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self.ended
        except asyncio.CancelledError:
            self.reader = None
            self.close()
            raise


class BenchClient:
    """Sends requests to one server over connections that are kept open.

    Args:
        url: ``http://host:port`` with an optional prefix.
        headers: sent with each request.
        verify: True if a certificate must be valid.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, verify: bool = True) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.secure = parts.scheme == "https"
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or (443 if self.secure else 80)
        self.prefix = parts.path.rstrip("/")
        self.idle: list[BenchConnection] = []
        self.connections: set[BenchConnection] = set()
        shown = f"[{self.host}]" if ":" in self.host else self.host
        fixed = {"host": f"{shown}:{self.port}", "content-type": "application/json", "accept": "*/*", **(headers or {})}
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._ssl: ssl.SSLContext | None = None
        if self.secure:
            self._ssl = ssl.create_default_context()
            if not verify:
                self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE

    def make_request(self, path: str, body: bytes | None, more: str = "") -> bytes:
        """Returns the bytes of a request: POST with ``body``, else GET. ``more``: header lines with their ends."""
        method, length = ("GET", "") if body is None else ("POST", f"content-length: {len(body)}\r\n")
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self._fixed}{length}{more}\r\n"
        return head.encode("latin-1") + (body or b"")

    async def run(self, request: bytes, exchange: Exchange) -> None:
        """Sends a request and fills ``exchange``, whose clock starts before a new connection is made."""
        exchange.sent = time.perf_counter()
        while True:
            try:
                connection, old = await self._get_connection()
            except (OSError, ssl.SSLError) as error:
                exchange.ended, exchange.error = time.perf_counter(), _describe_error(error)
                return
            await connection.run(request, exchange)
            # Only now may another request use the connection, since the previous one has finished with it.
            self.idle.append(connection)
            if not (old and exchange.error and not exchange.status):
                return
            # The server closed a kept connection in the meantime: it never received the request.
            exchange.error = ""

    async def fetch(self, path: str, content: Json = None) -> Json:
        """Returns the JSON of ``path``; POST with JSON ``content``, else GET.

        Raises:
            ConnectionError: no answer, or not one with 200 and JSON; the message says which.
        """
        exchange = Exchange()
        body = None if content is None else json.dumps(content).encode()
        await self.run(self.make_request(path, body), exchange)
        if exchange.error or exchange.status != 200:
            raise ConnectionError(exchange.error or f"{path} answers {exchange.status}")
        try:
            return json.loads(exchange.body)
        except ValueError:
            raise ConnectionError(f"{path} answers with no JSON") from None

    async def _get_connection(self) -> tuple[BenchConnection, bool]:
        """Returns a connection, and True if it has been used before."""
        while self.idle:
            kept = self.idle.pop()
            if kept.transport is not None and not kept.transport.is_closing():
                return kept, True
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: BenchConnection(self), self.host, self.port, ssl=self._ssl)
        self.connections.add(made)
        return made, False

    def forget(self, connection: BenchConnection) -> None:
        """Removes a connection that has ended."""
        self.connections.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def close(self) -> None:
        """Closes all connections."""
        for connection in list(self.connections):
            connection.close()


def _describe_error(error: OSError) -> str:
    return f"no connection: {error.strerror or type(error).__name__}"
