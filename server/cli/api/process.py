"""One of several API processes: ``python -P -m trencadis.server.cli.api.process FD INDEX``, one end of a socket pair.

It has the app and no engine; the front, which started it, has the engines and ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import signal
import socket
from typing import TYPE_CHECKING, Any

from trencadis.core.errors import StartupError
from trencadis.core.process import children, function_trace, heap, wire
from trencadis.server.cli import logs
from trencadis.server.cli.api.serving import FLUSH_SECONDS, TRACES_SECONDS, reloads
from trencadis.server.cli.run import find_app, routes
from trencadis.server.config.settings import Settings
from trencadis.server.front import messages
from trencadis.server.front.remote import FrontLink, client_of
from trencadis.server.front.table import SharedTable
from trencadis.server.http import listen

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.server.routes.state import AppState

log = logging.getLogger("trencadis.server")

COUNT_EVERY = 1.0
"""Seconds between two notes of how many connections are open, for the bound over all processes."""


class FrontGone(Exception):
    """The front has ended before it said what to serve."""


def first_message(sock: socket.socket) -> messages.Serve:
    """What the front wants served."""

    def read(count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = sock.recv(count - len(found))
            if not more:
                raise FrontGone
            found += more
        return found

    size, _ = wire.HEADER.unpack(read(wire.HEADER.size))
    message = messages.decode_down(read(size))
    assert isinstance(message, messages.Serve), "the first frame says what to serve"
    return message


def main(sock: socket.socket) -> int:
    """Serves until the front says to leave; returns the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the front tells what a terminal's end or an operator wants
    try:
        told = first_message(sock)
    except (FrontGone, OSError):
        return 1
    settings = _one_line_for_all(told.settings, told.index)
    logs.setup(settings.engine.log_level, settings.server, settings.engine.log_format)
    function_trace.start_if_asked()
    link = FrontLink(sock, told.replicas, SharedTable(told.table, told.count, told.index))
    try:
        with heap.uncollected():
            app = find_app(settings.server.app)(settings, client_of(link))
        serving = _PartServing(settings, link, app, told)
    except StartupError as error:
        sock.sendall(messages.frame(messages.Failed(str(error), 2)))
        return 2
    except Exception as error:
        log.exception("API process %d cannot start", told.index)
        sock.sendall(messages.frame(messages.Failed(f"{type(error).__name__}: {error}"[:500], 1)))
        return 1
    if not told.index:
        for path, methods in routes(app):
            log.info("Route: %s, Methods: %s", path, methods)
    gc.collect()
    gc.freeze()
    asyncio.run(serving.run())
    return 0


def _one_line_for_all(settings: Settings, index: int) -> Settings:
    """The first process alone writes the line about throughput, which is about the engines."""
    if not index:
        return settings
    return dataclasses.replace(settings, server=dataclasses.replace(settings.server, disable_log_stats=True))


class _PartServing:
    """What runs in the event loop: uvicorn, and the link to the front."""

    def __init__(self, settings: Settings, link: FrontLink, app: FastAPI, told: messages.Serve) -> None:
        from trencadis.server.http.web import make_server

        self.link = link
        self.state: AppState | None = getattr(app.state, "trencadis", None)
        self.sock = listen.inherited(settings.server, told.listener)
        self.sock.elsewhere = link.part.connections
        self.web = make_server(settings.server, app, FLUSH_SECONDS, told.count)
        link.answers["alive"] = self._alive
        link.answers["figures"] = self._figures
        link.answers["close turns"] = self._close_turns
        link.orders[messages.Leave] = self._leave
        link.orders[messages.Reload] = lambda message: self._reload()

    async def run(self) -> None:
        """Serves until the front says to leave, or is gone."""
        helpers = [
            asyncio.create_task(self.link.run()),
            asyncio.create_task(self._say_built()),
            asyncio.create_task(self._count()),
            asyncio.create_task(heap.keep_collected(lambda: len(self.web.server_state.tasks))),
            asyncio.create_task(heap.keep_tidy(lambda: sum(one.stats.steps for one in self.link.replicas))),
        ]
        await self.web.serve(sockets=[self.sock])
        if self.state is not None and self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close, TRACES_SECONDS)
        for task in helpers:
            task.cancel()

    async def _say_built(self) -> None:
        while not self.web.started or self.link.writer is None:
            await asyncio.sleep(0.01)
        longest = 0 if self.state is None else self.state.service.max_model_len
        self.link.channel.write(messages.Built(longest))

    async def _count(self) -> None:
        while True:
            self.link.part.connections(len(self.sock.open))
            if self.state is not None:
                _ = self.state.outside  # notes how many wait here
            await asyncio.sleep(COUNT_EVERY)

    async def _alive(self, given: dict[str, Any]) -> bytes:
        return b""

    async def _figures(self, given: dict[str, Any]) -> bytes:
        if self.state is None:
            return b"\x90"  # no families, in msgpack
        from trencadis.server.metrics.added import packed

        return packed(self.state.metrics.registry)

    async def _close_turns(self, given: dict[str, Any]) -> bytes:
        turns = None if self.state is None else self.state.turns
        return b"0" if turns is None else str(await turns.close(given["seconds"])).encode()

    def _leave(self, message: messages.Leave) -> None:
        if self.state is not None and self.state.turns is not None:
            self.state.turns.stop()
        self.web.leave(message.seconds)

    def _reload(self) -> None:
        for call in reloads(self.web.certificates, self.state):
            call()


if __name__ == "__main__":
    children.run(main)
