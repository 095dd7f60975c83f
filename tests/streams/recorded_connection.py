"""An application behind a real connection whose socket is a list of bytes, over an engine whose deltas a test gives."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import h11

from tests.fakes.scripted_app import ScriptedApp, ScriptedEngine
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta, Request, TokenLogprob
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.engine.engine_client_and_request_timing import DeltaCallback
from trencadis.server.engine.engine_process_link import RequestLink
from trencadis.server.http.uvicorn_server import make_server

HIGH = 64 << 10
"""Bytes that wait in a socket before its writer is asked to pause, as asyncio does it."""

UVICORN = "uvicorn.error", "uvicorn.access", "uvicorn.asgi"


class Frames:
    """The socket of an engine, which keeps what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[engine_messages.Down] = []

    def write(self, data: bytes) -> None:
        self.sent.append(engine_messages.decode_down(data[engine_messages.HEADER.size :]))

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None: ...


class WiredEngine(ScriptedEngine):
    """Its requests are open at a link, as those of a real engine are; ``straight``: whether deltas may be diverted."""

    def __init__(self, straight: bool = True) -> None:
        super().__init__([], -1)
        self.straight = straight
        self.frames, self.link = Frames(), RequestLink()
        self.link.writer = cast(Any, self.frames)

    def submit(self, request: Request, pixels: Sequence[Any]) -> Any:
        self.submitted.append((request, list(pixels)))
        return self.link.submit(request, pixels)

    def abort(self, id: str, choice: int = -1) -> None:
        self.link.abort(id, choice)

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        if self.straight:
            self.link.set_delta_callback(id, callback)

    async def step(self, make: Callable[[Request, int], Delta]) -> None:
        """A step in which each unfinished choice of each request gets what ``make`` gives."""
        requested = {request.id: request for request, _ in self.submitted}
        open = [
            (requested[id], choice) for id, entry in self.link.requests.items() for choice in sorted(entry.unfinished)
        ]
        await self.link.deliver_all([make(request, choice) for request, choice in open])
        await settled()

    @property
    def aborted_ids(self) -> list[tuple[str, int]]:
        return [(id, m.choice) for m in self.frames.sent if isinstance(m, engine_messages.Abort) for id in m.ids]


async def settled(turns: int = 12) -> None:
    """Lets the event loop do what it can."""
    for _ in range(turns):
        await asyncio.sleep(0)


class ListTransport(asyncio.Transport):
    """Keeps what is written; ``full``: the other end reads nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written: list[bytes] = []
        self.full, self.closed, self.waits = False, False, 0
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))
        if self.full:
            self.waits += len(data)
            if self.waits > HIGH:
                self.protocol.pause_writing()

    def read_all(self) -> None:
        """The other end has read what waited."""
        self.full, self.waits = False, 0
        self.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class WiredClient:
    """One connection to an application; made within the event loop."""

    def __init__(self, web: Any) -> None:
        self.transport = ListTransport()
        self.connection = web.config.http_protocol_class(config=web.config, server_state=web.server_state, app_state={})
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    def ask(self, path: str, body: dict[str, Any], version: str = "1.1") -> None:
        said = json.dumps({"model": "m", "stream": True, "ignore_eos": True, **body}).encode()
        head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        self.connection.data_received(head.encode() + b"content-length: %d\r\n\r\n" % len(said) + said)

    def leave(self) -> None:
        self.transport.close()

    @property
    def raw(self) -> bytes:
        return b"".join(self.transport.written)

    @property
    def body(self) -> bytes:
        """The body so far, as another implementation of HTTP reads it."""
        reader, found = h11.Connection(h11.CLIENT), b""
        reader.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(self.raw)
        while True:
            event = reader.next_event()
            if isinstance(event, h11.Data):
                found += event.data
            elif event is h11.NEED_DATA or isinstance(event, h11.EndOfMessage):
                return found

    @property
    def events(self) -> list[Any]:
        """The data of its events; what is no JSON as it is."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def wired(harness: ScriptedApp, engine: WiredEngine, **flags: Any) -> Any:
    """A server over ``engine``, which accepts no connections by itself."""
    harness.engine = engine
    levels = {name: logging.getLogger(name).level for name in UVICORN}
    made = make_server(ServerConfig(uvicorn_log_level="error"), harness.app(**flags), 1)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)  # uvicorn sets those of the process
    return made


def score(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.1 * token, 1, [token + i for i in range(top)], [-1e-7 - i for i in range(top)])
