"""The event loop of ``serve``: the supervisor, the reactions to signals, and a web server.

Reports the server's state to systemd (sd_notify(3)): starting, ready, stopping, alive; does nothing without
NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from trencadis.core.process import heap_trimmer
from trencadis.core.process.log_setup import flush_logs
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.http import listener
from trencadis.server.processes import signals_and_logging

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.http.listener import Certificates
    from trencadis.server.processes.multi_engine_client import Fleet
    from trencadis.server.processes.remote_engine import RemoteEngines
    from trencadis.server.routes.app_state import AppState
    from trencadis.server.tenants.fair_queue import TenantFairQueue


STARTING_EVERY = 10.0
EXTENSION = 60.0
"""Seconds that each message during start-up requests: loading and warm-up may take longer than any fixed limit."""


class Notifier:
    """The notification socket of one systemd unit.

    Args:
        environ: has NOTIFY_SOCKET, and WATCHDOG_USEC if systemd restarts a server that sends nothing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        usec = environ.get("WATCHDOG_USEC", "")
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog = int(usec) / 1e6 if usec.isdecimal() and mine else 0.0
        self.ready = False

    def send(self, *lines: str) -> None:
        """Sends one sd_notify message; dropped if the socket is full, so that the event loop does not block."""
        if self._address:
            kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)

    def notify_ready(self) -> None:
        """Reports that the server accepts requests."""
        self.ready = True
        self.send("READY=1", "STATUS=serving")

    def notify_stopping(self) -> None:
        """Reports that the server drains."""
        self.send("STOPPING=1", "STATUS=finishing requests")

    async def run(self, alive: Callable[[], bool], phase: Callable[[], str]) -> None:
        """Requests more time while the server starts, then reports that it is alive, at twice the watchdog's rate. This
        runs in the event loop that serves: if it hangs, systemd gets no messages.
        """
        if not self._address:
            return
        while not self.ready:
            self.send(f"EXTEND_TIMEOUT_USEC={EXTENSION * 1e6:.0f}", f"STATUS={phase()}", "WATCHDOG=1")
            await asyncio.sleep(min(STARTING_EVERY, self.watchdog / 2 or STARTING_EVERY))
        while self.watchdog:
            if alive():
                self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / 2)


log = logging.getLogger("trencadis.server")

FLUSH_SECONDS = 5
"""Seconds for writing the last answers once the engine is done."""
ABORT_FLUSH_SECONDS = 1
"""The same if requests are aborted."""
TRACES_SECONDS = 3.0
"""Seconds for sending the last traces to their collector."""


class ServerLifecycle:
    """A server from start to end; sub-classes answer requests.

    Args:
        address: shown in its log line.
    """

    def __init__(self, settings: Settings, supervisor: Supervisor | Fleet, address: str) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self.address = address
        self.systemd = Notifier()
        self.exit_code = 0
        self.exit_message = ""
        self.started_logged = False
        self.draining: asyncio.Task[None] | None = None
        supervisor.on_fatal = self.on_fatal
        supervisor.on_info.append(lambda info: self.log_started())

    async def serve(self) -> None:
        """Answers requests until ``shut_down``."""
        raise NotImplementedError

    def shut_down(self, seconds: int = FLUSH_SECONDS) -> None:
        """Ends ``serve``, which has ``seconds`` for the last answers."""
        raise NotImplementedError

    def get_reload_calls(self) -> Sequence[Callable[[], None]]:
        """Returns the functions that read files again at SIGHUP."""
        return ()

    def count_open_requests(self) -> int:
        """Returns the number of requests that are open in this process."""
        return self.supervisor.open_requests

    @property
    def has_fair_queue(self) -> bool:
        """True if requests wait in the fair queue before they are read."""
        return False

    def count_fair_queued(self) -> int:
        """Returns the number of requests in the fair queue."""
        return 0

    async def drain_fair_queue(self, seconds: float) -> int:
        """Closes the fair queue; returns how many requests were not admitted within ``seconds`` and end with an
        error.
        """
        return 0

    async def on_closed(self) -> None:
        """Called last, after the server has ended."""

    def run_to_end(self) -> int:
        """Serves, prints the last message, and returns the exit code."""
        code = asyncio.run(self.run())
        if self.exit_message:
            flush_logs()  # the reason is the last line
            print(f"trencadis: {self.exit_message}", file=sys.stderr, flush=True)
        return code

    async def run(self) -> int:
        """Serves until a signal, or until an engine cannot start; returns the exit code."""
        helpers = self._begin()
        try:
            await self.serve()
        finally:
            await self._shut_down_engine(helpers)
        return self.exit_code

    def _begin(self) -> list[asyncio.Task[None]]:
        """Handles signals and supervises the engine from now on; returns the tasks that run in addition to the
        server.
        """
        signals_and_logging.handle_in_loop(asyncio.get_running_loop(), self.drain, self.stop_now)
        signals_and_logging.on_hangup(asyncio.get_running_loop(), self.get_reload_calls())
        self.supervisor.start()
        assert self.supervisor.task is not None
        self.supervisor.task.add_done_callback(self.on_supervision_ended)
        tidy = asyncio.create_task(heap_trimmer.run_trimmer(lambda: self.supervisor.stats.steps))
        collected = asyncio.create_task(heap_trimmer.run_collector(self.count_open_requests))
        notifying = asyncio.create_task(
            self.systemd.run(lambda: not self.supervisor.failing, lambda: self.supervisor.phase)
        )
        return [tidy, collected, notifying]

    async def _shut_down_engine(self, helpers: list[asyncio.Task[None]]) -> None:
        for task in helpers:
            task.cancel()
        await self.supervisor.stop()
        await self.on_closed()

    def log_started(self) -> None:
        """Logs at the engine's first start that the server is up."""
        if not self.started_logged:
            self.started_logged = True
            self.systemd.notify_ready()
            signals_and_logging.log_started(self.address)

    def on_fatal(self, message: str, code: int) -> None:
        """Ends the server with one last line, since the first start has failed."""
        self.exit_code, self.exit_message = code, message
        self.stop_now()

    def on_supervision_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("supervision failed", exc_info=task.exception())
            self.exit_code = 1
            self.stop_now()

    def drain(self, terminated: bool) -> None:
        """Handles the first SIGINT or SIGTERM: stops accepting requests and waits for the running ones."""
        self.systemd.notify_stopping()
        self.draining = asyncio.create_task(self._drain(self.settings.server.drain_delay if terminated else 0.0))

    async def _drain(self, delay: float) -> None:
        """Accepts requests for another ``delay`` seconds, since load balancers notice a failing probe late; then
        drains.
        """
        supervisor, seconds = self.supervisor, float(self.settings.server.shutdown_timeout)
        if delay and supervisor.accepting:
            supervisor.leave()
            log.info("taking requests for %g s more (--drain-delay); a second signal stops at once", delay)
            await asyncio.sleep(delay)
        end = time.monotonic() + seconds
        if self.has_fair_queue:
            if waiting := self.count_fair_queued():
                supervisor.leave()
                log.info("%d requests wait in the fair queue; they are admitted for at most %g s", waiting, seconds)
            left = await self.drain_fair_queue(seconds)
            if left:
                log.error(
                    "%d requests were not admitted in %g s (--shutdown-timeout): they end with an error", left, seconds
                )
                self.exit_code = 1
            seconds = max(end - time.monotonic(), 0.0)
        if supervisor.open_requests:
            line = "finishing %d requests, at most %g s; a second signal stops at once"
            log.info(line, supervisor.open_requests, seconds)
        await supervisor.drain(seconds)
        if supervisor.stopping:
            return
        if supervisor.open_requests:
            line = "%d requests did not finish in %g s (--shutdown-timeout): they end with an error"
            log.error(line, supervisor.open_requests, seconds)
            self.exit_code = 1
            self.stop_now()
        else:
            self.shut_down()

    def stop_now(self) -> None:
        """Handles the second signal or the shutdown timeout: kills the engine, so that open streams end with an error.

        uvicorn's ``force_exit`` would cancel the lifespan task, which logs a traceback.
        """
        self.supervisor.kill()
        self.shut_down(ABORT_FLUSH_SECONDS)


class SingleProcessServer(ServerLifecycle):
    """A server of one process, which runs the app too."""

    def __init__(self, settings: Settings, supervisor: Supervisor | Fleet, app: FastAPI, sock: socket.socket) -> None:
        from trencadis.server.http.uvicorn_server import make_server

        super().__init__(settings, supervisor, listener.format_address(sock, bool(settings.server.ssl_certfile)))
        self.state: AppState | None = getattr(app.state, "trencadis", None)
        self.sock = sock
        self.web = make_server(settings.server, app, FLUSH_SECONDS)

    async def serve(self) -> None:
        """See ``ServerLifecycle``."""
        await self.web.serve(sockets=[self.sock])

    def shut_down(self, seconds: int = FLUSH_SECONDS) -> None:
        """See ``ServerLifecycle``."""
        self.web.leave(seconds)

    def get_reload_calls(self) -> Sequence[Callable[[], None]]:
        """See ``ServerLifecycle``."""
        return get_reload_calls(self.web.certificates, self.state)

    def stop_now(self) -> None:
        """See ``ServerLifecycle``."""
        if self.fair_queue is not None:
            self.fair_queue.stop()
        super().stop_now()

    def count_open_requests(self) -> int:
        """See ``ServerLifecycle``."""
        return len(self.web.server_state.tasks)

    @property
    def fair_queue(self) -> TenantFairQueue | None:
        """The fair queue, or None without tenants."""
        return None if self.state is None else self.state.fair_queue

    @property
    def has_fair_queue(self) -> bool:
        """See ``ServerLifecycle``."""
        return self.fair_queue is not None

    def count_fair_queued(self) -> int:
        """See ``ServerLifecycle``."""
        return 0 if self.fair_queue is None else self.fair_queue.waiting

    async def drain_fair_queue(self, seconds: float) -> int:
        """See ``ServerLifecycle``."""
        return 0 if self.fair_queue is None else await self.fair_queue.close(seconds)

    async def on_closed(self) -> None:
        """See ``ServerLifecycle``."""
        if self.state is not None and self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close, TRACES_SECONDS)


def get_reload_calls(certificates: Certificates | None, state: AppState | None) -> Sequence[Callable[[], None]]:
    """Returns the functions that read certificates and keys again."""
    again = [] if certificates is None else [certificates.reload]
    if state is not None and state.tenants is not None:
        again.append(state.tenants.reload)
    return again


def find_app(entry: str) -> Callable[[Settings, Supervisor | Fleet | RemoteEngines], FastAPI]:
    """Returns the factory of apps that ``package.module:name`` names."""
    module, _, name = entry.partition(":")
    found = getattr(importlib.import_module(module), name)
    return cast("Callable[[Settings, Supervisor | Fleet | RemoteEngines], FastAPI]", found)


def list_routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yields (path, methods) of every route that is served. Newer FastAPI has routers as a tree with a function to walk
    it.
    """
    from fastapi import routing

    from trencadis.server.http.fastapi_app import WRONG_TASK

    walk: Callable[[Any], Iterator[Any]] = getattr(routing, "iter_route_contexts", iter)
    for route in walk(app.routes):
        methods = getattr(route, "methods", None)
        if methods and getattr(route, "name", "") != WRONG_TASK:
            yield getattr(route, "path", ""), ", ".join(sorted(methods))
