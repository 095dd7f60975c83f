"""One of several API processes: ``python -P -m trencadis.server.processes.api_worker_process_main FD INDEX``: one end
of a pair.

It has the app and no engine; the front process, which started it, has the engines and ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import signal
import socket
from typing import TYPE_CHECKING

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.core.process import child_process_environment_and_exit, engine_messages, function_trace, heap_trimmer
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.http import listener
from trencadis.server.processes import ipc_messages_and_channel, signals_and_logging
from trencadis.server.processes.remote_engine import FrontLink, make_engine_client
from trencadis.server.processes.server_lifecycle import (
    FLUSH_SECONDS,
    TRACES_SECONDS,
    find_app,
    get_reload_calls,
    list_routes,
)
from trencadis.server.tenants.shared_limits_table import SharedTable

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.server.routes.serving_base import ServingState

log = logging.getLogger("trencadis.server")

COUNT_INTERVAL = 1.0
"""Seconds between two reports of how many connections are open, for the bound over all processes."""


class FrontGone(Exception):
    """The front process ended before it sent the serve order."""


def read_first_message(sock: socket.socket) -> ipc_messages_and_channel.ServeOrder:
    """Returns the serve order, the first message of the front process."""

    def read(count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = sock.recv(count - len(found))
            if not more:
                raise FrontGone
            found += more
        return found

    size, _ = engine_messages.HEADER.unpack(read(engine_messages.HEADER.size))
    message = ipc_messages_and_channel.decode_down(read(size))
    assert isinstance(message, ipc_messages_and_channel.ServeOrder), "the first frame says what to serve"
    return message


def main(sock: socket.socket) -> int:
    """Serves until the front process says to leave; returns the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the front process forwards SIGHUP
    try:
        order = read_first_message(sock)
    except (FrontGone, OSError):
        return 1
    settings = _log_stats_once(order.settings, order.index)
    signals_and_logging.set_up_logging(settings.engine, settings.server)
    function_trace.start_if_asked()
    link = FrontLink(sock, order.replicas, SharedTable(order.table, order.count, order.index))
    try:
        with heap_trimmer.pause_gc():
            app = find_app(settings.server.app)(settings, make_engine_client(link))
        serving = _ApiServer(settings, link, app, order)
    except StartupError as error:
        sock.sendall(ipc_messages_and_channel.make_frame(ipc_messages_and_channel.ApiFailed(str(error), 2)))
        return 2
    except Exception as error:
        log.exception("API process %d cannot start", order.index)
        sock.sendall(
            ipc_messages_and_channel.make_frame(
                ipc_messages_and_channel.ApiFailed(f"{type(error).__name__}: {error}"[:500], 1)
            )
        )
        return 1
    if not order.index:
        for path, methods in list_routes(app):
            log.info("Route: %s, Methods: %s", path, methods)
    gc.collect()
    gc.freeze()
    asyncio.run(serving.run())
    return 0


def _log_stats_once(settings: Settings, index: int) -> Settings:
    """Disables the throughput log line in all API processes but the first, since it is about the engines."""
    if not index:
        return settings
    return dataclasses.replace(settings, server=dataclasses.replace(settings.server, disable_log_stats=True))


class _ApiServer:
    """The parts that run in the event loop: uvicorn, and the link to the front process."""

    def __init__(
        self, settings: Settings, link: FrontLink, app: FastAPI, order: ipc_messages_and_channel.ServeOrder
    ) -> None:
        from trencadis.server.http.uvicorn_server import make_server

        self.link = link
        self.state: ServingState | None = getattr(app.state, "trencadis", None)
        self.sock = listener.adopt_listener(settings.server, order.listener)
        self.sock.count_elsewhere = link.shared.update_connections
        self.web = make_server(settings.server, app, FLUSH_SECONDS, order.count)
        link.answers["alive"] = self._answer_alive
        link.answers["figures"] = self._answer_metrics
        link.answers["close turns"] = self._drain_fair_queue
        link.commands[ipc_messages_and_channel.LeaveOrder] = self._shut_down
        link.commands[ipc_messages_and_channel.ReloadOrder] = lambda message: self._reload()

    async def run(self) -> None:
        """Serves until the front process says to leave, or has ended."""
        helpers = [
            asyncio.create_task(self.link.run()),
            asyncio.create_task(self._report_ready()),
            asyncio.create_task(self._count_connections()),
            asyncio.create_task(heap_trimmer.run_collector(lambda: len(self.web.server_state.tasks))),
            asyncio.create_task(heap_trimmer.run_trimmer(lambda: sum(one.stats.steps for one in self.link.replicas))),
        ]
        await self.web.serve(sockets=[self.sock])
        if self.state is not None and self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close, TRACES_SECONDS)
        for task in helpers:
            task.cancel()

    async def _report_ready(self) -> None:
        while not self.web.started or self.link.writer is None:
            await asyncio.sleep(0.01)
        longest = 0 if self.state is None else self.state.service.max_model_len
        self.link.channel.write(ipc_messages_and_channel.ApiReady(longest))

    async def _count_connections(self) -> None:
        while True:
            self.link.shared.update_connections(len(self.sock.open))
            if self.state is not None:
                _ = self.state.fair_queued  # reading it shares how many requests wait here
            await asyncio.sleep(COUNT_INTERVAL)

    async def _answer_alive(self, given: JsonObject) -> bytes:
        return b""

    async def _answer_metrics(self, given: JsonObject) -> bytes:
        if self.state is None:
            return b"\x90"  # an empty list of families in msgpack
        from trencadis.server.processes.aggregated_metrics import pack_registry

        return pack_registry(self.state.metrics.registry)

    async def _drain_fair_queue(self, given: JsonObject) -> bytes:
        queue = None if self.state is None else self.state.fair_queue
        return b"0" if queue is None else str(await queue.close(given["seconds"])).encode()

    def _shut_down(self, message: ipc_messages_and_channel.LeaveOrder) -> None:
        if self.state is not None and self.state.fair_queue is not None:
            self.state.fair_queue.stop()
        self.web.leave(message.seconds)

    def _reload(self) -> None:
        for call in get_reload_calls(self.web.certificates, self.state):
            call()


if __name__ == "__main__":
    child_process_environment_and_exit.run(main, oom_score=250)
