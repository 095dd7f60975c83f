"""``trencadis serve``: bind, spawn the engine, build the app meanwhile, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from trencadis.core.errors import StartupError
from trencadis.core.links.topology import topology
from trencadis.core.process import function_trace, heap
from trencadis.server.cli import logs, signals
from trencadis.server.cli.notify import Notifier
from trencadis.server.config import cmdline, dump
from trencadis.server.config.config import ServerConfig
from trencadis.server.config.settings import Settings
from trencadis.server.engine.spawn import EngineHandle
from trencadis.server.fleet.start import start
from trencadis.server.http import listen, tls

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.core.config import EngineConfig
    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.fleet.fleet import Fleet
    from trencadis.server.routes.state import AppState

log = logging.getLogger("trencadis.server")

FLUSH_SECONDS = 5
TRACES_SECONDS = 3.0
"""Seconds in which the last traces may reach their collector."""
DEMO_NAME = "trencadis-demo"
OPEN_DOOR = "everybody who reaches this port may use the server: set --api-key, --api-key-file or --host 127.0.0.1"


def serve(settings: Settings) -> int:
    """Runs until a signal or a start-up error; returns the exit code.

    Raises:
        StartupError: one line for the terminal, exit code 2.
    """
    begun = time.monotonic()
    logs.setup(settings.engine.log_level, settings.server, settings.engine.log_format)
    function_trace.start_if_asked()
    for note in (*cmdline.hide_keys(settings), *settings.notes):
        log.warning("%s", note)
    for line in dump.lines(settings):
        log.info("%s", line)
    lie = topology(settings.engine, os.environ)
    if not lie.leads:
        from trencadis.core.executor.following import follow

        return follow(find_model(settings).engine, lie, os.environ, again=not lie.alone)
    if lie.over_hosts and settings.server.data_parallel_size > 1:
        raise StartupError(
            "--data-parallel-size: an engine whose ranks are on several machines is alone in its server."
        )
    listen.raise_file_limit()
    if settings.server.ssl_certfile:
        tls.Certificates(settings.server)  # a wrong one ends the start-up here, before anything slow
    with listen.listen(settings.server) as sock:
        if listen.reachable(sock) and not (settings.server.api_key or settings.server.api_key_file):
            log.warning("%s", OPEN_DOOR)
        try:
            return _start(find_model(settings), sock, begun)
        except (signals.EarlyStop, KeyboardInterrupt):
            return 0
        finally:
            if settings.server.uds:
                with contextlib.suppress(OSError):
                    os.unlink(settings.server.uds)


def find_model(settings: Settings) -> Settings:
    """Settings with the folder of the model, and its names in the API as the user knows them."""
    engine, server = settings.engine, settings.server
    named = engine.model
    changes: dict[str, Any] = {}
    if server.app != ServerConfig().app:
        named = named or "test"
    elif not named:
        from trencadis.assets import demo_path

        named, changes["model"] = DEMO_NAME, str(demo_path())
        log.info("no model named: serving the bundled demo as %s", DEMO_NAME)
        if not demo_path().is_dir():
            raise StartupError("This installation has no bundled demo; name a model: trencadis serve MODEL.")
    else:
        from trencadis.server.config.hub import model_folder

        changes["model"] = str(model_folder(engine))
    from trencadis.server.config.hub import tokenizer_folder, tokenizer_name

    if tokenizer_name(engine) and "model" in changes:
        changes["tokenizer"] = str(tokenizer_folder(engine))
    names = server.served_model_name or [named]
    return dataclasses.replace(
        settings,
        engine=dataclasses.replace(engine, **changes),
        server=dataclasses.replace(server, served_model_name=names),
    )


def _start(settings: Settings, sock: socket.socket, begun: float) -> int:
    """Starts the engine, which loads while this process imports the web framework."""
    size = settings.server.data_parallel_size
    what = "the engine" if size == 1 else f"{size} engines"
    log.info("listening on %s; starting %s", listen.address(sock, bool(settings.server.ssl_certfile)), what)
    handles: list[EngineHandle] = []
    try:
        engines = start(settings.engine, size, settings.server.data_parallel_backend, handles.append)
        supervisor = supervise(settings.server, engines.configs, engines.handles, settings.server.sleep_after)
        app = find_app(settings.server.app)(settings, supervisor)
        for path, methods in routes(app):
            log.info("Route: %s, Methods: %s", path, methods)
        # Objects of start-up live for ever; without freeze, each full collection during a stream would walk them.
        gc.collect()
        gc.freeze()
        log.info("app built (%.1f s)", time.monotonic() - begun)
        serving = _Serving(settings, supervisor, app, sock)
        code = asyncio.run(serving.run())
        if serving.last_words:
            print(f"trencadis: {serving.last_words}", file=sys.stderr, flush=True)
        return code
    finally:
        end(handles)


def supervise(
    server: ServerConfig, configs: Sequence[EngineConfig], handles: Sequence[EngineHandle], sleep_after: float = 0.0
) -> Supervisor | Fleet:
    """What keeps the engines running; ``sleep_after`` as ``Supervisor`` takes it."""
    from trencadis.server.engine.supervisor import Supervisor

    options: dict[str, Any] = {
        "compile_timeout": server.compile_timeout,
        "max_restarts": server.max_engine_restarts,
        "sleep_after": sleep_after,
    }
    if len(configs) == 1:
        return Supervisor(configs[0], handles[0], **options)
    from trencadis.server.fleet.fleet import Fleet

    return Fleet(configs, handles, **options)


def end(handles: Sequence[EngineHandle]) -> None:
    """Ends the engines, also after an interrupted start-up; the supervisor has ended restarted ones."""
    signals.ignore()
    for handle in handles:
        if handle.process.poll() is None:
            handle.kill()


def find_app(entry: str) -> Callable[[Settings, Supervisor | Fleet], FastAPI]:
    """The factory of apps that ``package.module:name`` names."""
    module, _, name = entry.partition(":")
    return cast("Callable[[Settings, Supervisor | Fleet], FastAPI]", getattr(importlib.import_module(module), name))


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(path, methods) of every route that is served. Newer FastAPI keeps routers as a tree, which it offers to walk."""
    from fastapi import routing

    from trencadis.server.routes.pooling.elsewhere import ELSEWHERE

    walk: Callable[[Any], Iterator[Any]] = getattr(routing, "iter_route_contexts", iter)
    for route in walk(app.routes):
        methods = getattr(route, "methods", None)
        if methods and getattr(route, "name", "") != ELSEWHERE:
            yield getattr(route, "path", ""), ", ".join(sorted(methods))


class _Serving:
    """What runs in the event loop: uvicorn, the supervisor, and the reactions to signals."""

    def __init__(self, settings: Settings, supervisor: Supervisor | Fleet, app: FastAPI, sock: socket.socket) -> None:
        from trencadis.server.http.web import make_server

        self.settings = settings
        self.supervisor = supervisor
        self.state: AppState | None = getattr(app.state, "trencadis", None)
        self.sock = sock
        self.web = make_server(settings.server, app, FLUSH_SECONDS)
        self.unit = Notifier()
        self.code = 0
        self.last_words = ""
        self.said = False
        self.draining: asyncio.Task[None] | None = None
        supervisor.on_fatal = self.fatal
        supervisor.on_info.append(lambda info: self.started())

    async def run(self) -> int:
        """Serves until a signal, or an engine that cannot start."""
        helpers = self._begin()
        try:
            await self.web.serve(sockets=[self.sock])
        finally:
            await self._end(helpers)
        return self.code

    def _begin(self) -> list[asyncio.Task[None]]:
        """Reacts to signals and supervises the engine from now on; the tasks beside the server."""
        signals.in_loop(asyncio.get_running_loop(), self.drain, self.stop_now)
        again = [] if self.web.certificates is None else [self.web.certificates.renew]
        if self.state is not None and self.state.tenants is not None:
            again.append(self.state.tenants.reload)
        signals.on_hangup(asyncio.get_running_loop(), again)
        self.supervisor.start()
        assert self.supervisor.task is not None
        self.supervisor.task.add_done_callback(self.supervision_ended)
        tidy = asyncio.create_task(heap.keep_tidy(lambda: self.supervisor.stats.steps))
        collected = asyncio.create_task(heap.keep_collected(lambda: len(self.web.server_state.tasks)))
        told = asyncio.create_task(self.unit.run(lambda: not self.supervisor.failing, lambda: self.supervisor.phase))
        return [tidy, collected, told]

    async def _end(self, helpers: list[asyncio.Task[None]]) -> None:
        for task in helpers:
            task.cancel()
        await self.supervisor.stop()
        if self.state is not None and self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close, TRACES_SECONDS)

    def started(self) -> None:
        """Logs at the engine's first start that the server is up."""
        if not self.said:
            self.said = True
            self.unit.started()
            logs.say_started(listen.address(self.sock, bool(self.settings.server.ssl_certfile)))

    def fatal(self, message: str, code: int) -> None:
        """The first start has failed: ends the server with one last line."""
        self.code, self.last_words = code, message
        self.stop_now()

    def supervision_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("supervision failed", exc_info=task.exception())
            self.code = 1
            self.stop_now()

    def drain(self, terminated: bool) -> None:
        """Reacts to the first signal."""
        self.unit.stopping()
        self.draining = asyncio.create_task(self._drain(self.settings.server.drain_delay if terminated else 0.0))

    async def _drain(self, delay: float) -> None:
        """Takes requests for ``delay`` seconds more, since balancers notice a failing probe late; then drains."""
        supervisor, seconds = self.supervisor, float(self.settings.server.shutdown_timeout)
        if delay and supervisor.accepting:
            supervisor.leave()
            log.info("taking requests for %g s more (--drain-delay); a second signal stops at once", delay)
            await asyncio.sleep(delay)
        end = time.monotonic() + seconds
        turns = None if self.state is None else self.state.turns
        if turns is not None:
            if turns.waiting:
                supervisor.leave()
                log.info("%d requests wait for their turn; they are taken, at most for %g s", turns.waiting, seconds)
            left = await turns.close(seconds)
            if left:
                log.error("%d requests had no turn in %g s (--shutdown-timeout): they end with an error", left, seconds)
                self.code = 1
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
            self.code = 1
            self.stop_now()
        else:
            self.leave()

    def stop_now(self) -> None:
        """Stops at once, at the second signal or when time is up: kills the engine, so open streams end with an error.

        uvicorn's ``force_exit`` would cancel the lifespan task, which logs a traceback.
        """
        if self.state is not None and self.state.turns is not None:
            self.state.turns.stop()
        self.supervisor.kill()
        self.web.config.timeout_graceful_shutdown = 1
        self.leave()

    def leave(self) -> None:
        """Ends uvicorn once it runs: told during its own start, it would not shut the app down."""
        if self.web.started:
            self.web.should_exit = True
        else:
            asyncio.get_running_loop().call_later(0.02, self.leave)
