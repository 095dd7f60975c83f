"""``trencadis serve``: bind, spawn the engine, build the app meanwhile, serve, drain."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from trencadis.core.errors import StartupError
from trencadis.core.links.topology import topology
from trencadis.core.process import function_trace, heap
from trencadis.server.cli import logs, signals
from trencadis.server.cli.api.serving import WebServing
from trencadis.server.cli.api.several import serve_by_several
from trencadis.server.config import cmdline, dump
from trencadis.server.config.config import ServerConfig
from trencadis.server.config.settings import Settings
from trencadis.server.engine.spawn import EngineHandle
from trencadis.server.fleet.start import Engines, start
from trencadis.server.http import listen, tls

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.core.config import EngineConfig
    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.fleet.fleet import Fleet
    from trencadis.server.front.remote import RemoteEngines

log = logging.getLogger("trencadis.server")

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
        if settings.server.api_server_count > 1:
            return serve_by_several(settings, sock, lambda: _supervised(settings, engines), begun)
        with heap.uncollected():
            supervisor = _supervised(settings, engines)
            app = find_app(settings.server.app)(settings, supervisor)
        for path, methods in routes(app):
            log.info("Route: %s, Methods: %s", path, methods)
        # Objects of start-up live for ever; without freeze, each full collection during a stream would walk them.
        gc.collect()
        gc.freeze()
        log.info("app built (%.1f s)", time.monotonic() - begun)
        return WebServing(settings, supervisor, app, sock).to_the_end()
    finally:
        end(handles)


def _supervised(settings: Settings, engines: Engines) -> Supervisor | Fleet:
    return supervise(settings.server, engines.configs, engines.handles, settings.server.sleep_after)


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


def find_app(entry: str) -> Callable[[Settings, Supervisor | Fleet | RemoteEngines], FastAPI]:
    """The factory of apps that ``package.module:name`` names."""
    module, _, name = entry.partition(":")
    found = getattr(importlib.import_module(module), name)
    return cast("Callable[[Settings, Supervisor | Fleet | RemoteEngines], FastAPI]", found)


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(path, methods) of every route that is served. Newer FastAPI keeps routers as a tree, which it offers to walk."""
    from fastapi import routing

    from trencadis.server.routes.pooling.elsewhere import ELSEWHERE

    walk: Callable[[Any], Iterator[Any]] = getattr(routing, "iter_route_contexts", iter)
    for route in walk(app.routes):
        methods = getattr(route, "methods", None)
        if methods and getattr(route, "name", "") != ELSEWHERE:
            yield getattr(route, "path", ""), ", ".join(sorted(methods))
