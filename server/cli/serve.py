"""``trencadis serve``: binds, spawns the engine, builds the app meanwhile, serves, drains."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trencadis.core.errors import StartupError
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.links.rank_placement import topology
from trencadis.core.process import function_trace, heap_trimmer
from trencadis.server.config import resolve_settings
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http import listener
from trencadis.server.processes import signals_and_logging
from trencadis.server.processes.multi_api_server import run_multi_api_server
from trencadis.server.processes.server_lifecycle import SingleProcessServer, find_app, list_routes
from trencadis.server.processes.start_engines import StartedEngines, start_engines

if TYPE_CHECKING:
    from trencadis.core.engine_config import EngineConfig
    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.processes.multi_engine_client import Fleet

log = logging.getLogger("trencadis.server")

DEMO_NAME = "trencadis-demo"
NO_KEYS_WARNING = (
    "everybody who reaches this port may use the server: set --api-key, --api-key-file or --host 127.0.0.1"
)


def serve(settings: Settings) -> int:
    """Runs until a signal or a start-up error; returns the exit code.

    Raises:
        StartupError: one line for the terminal, exit code 2.
    """
    begun = time.monotonic()
    signals_and_logging.set_up_logging(settings.engine, settings.server)
    function_trace.start_if_asked()
    for note in (*resolve_settings.hide_keys(settings), *settings.notes):
        log.warning("%s", note)
    for line in resolve_settings.format_startup_lines(settings):
        log.info("%s", line)
    lie = topology(settings.engine, os.environ)
    if not lie.leads:
        from trencadis.core.executor.headless_ranks import run_headless

        return run_headless(find_model(settings).engine, lie, os.environ, again=not lie.alone)
    if lie.over_hosts and settings.server.data_parallel_size > 1:
        raise StartupError(
            "--data-parallel-size: an engine whose ranks are on several machines is alone in its server."
        )
    listener.raise_file_limit()
    if settings.server.ssl_certfile:
        listener.Certificates(settings.server)  # a wrong certificate ends the start-up here, before anything slow
    with listener.open_listener(settings.server) as sock:
        if listener.is_reachable(sock) and not (settings.server.api_key or settings.server.api_key_file):
            log.warning("%s", NO_KEYS_WARNING)
        try:
            return _start(find_model(settings), sock, begun)
        except (signals_and_logging.EarlyStop, KeyboardInterrupt):
            return 0
        finally:
            if settings.server.uds:
                with contextlib.suppress(OSError):
                    os.unlink(settings.server.uds)


def find_model(settings: Settings) -> Settings:
    """Returns settings with the model's folder, and the model's root and names in the API as given by the user."""
    engine, server = settings.engine, settings.server
    named = root = engine.model
    changes: dict[str, Any] = {}
    if server.app != ServerConfig().app:
        named = named or "test"
    elif not named:
        from trencadis.assets import demo_path

        named, root = DEMO_NAME, str(demo_path())
        changes["model"] = root
        log.info("no model named: serving the bundled demo as %s", DEMO_NAME)
        if not demo_path().is_dir():
            raise StartupError("This installation has no bundled demo; name a model: trencadis serve MODEL.")
    else:
        from trencadis.server.config.model_download import find_model_folder

        changes["model"] = str(find_model_folder(engine))
    from trencadis.server.config.model_download import find_tokenizer_folder, get_tokenizer_name

    if get_tokenizer_name(engine) and "model" in changes:
        changes["tokenizer"] = str(find_tokenizer_folder(engine))
    names = server.served_model_name or [named]
    return dataclasses.replace(
        settings,
        engine=dataclasses.replace(engine, **changes),
        server=dataclasses.replace(server, served_model_name=names),
        model_root=root,
    )


def _start(settings: Settings, sock: socket.socket, begun: float) -> int:
    """Starts the engine, which loads while this process imports the web framework; then serves."""
    size = settings.server.data_parallel_size
    what = "the engine" if size == 1 else f"{size} engines"
    log.info("listening on %s; starting %s", listener.format_address(sock, bool(settings.server.ssl_certfile)), what)
    handles: list[EngineHandle] = []
    try:
        engines = start_engines(settings.engine, size, settings.server.data_parallel_backend, handles.append)
        if settings.server.api_server_count > 1:
            return run_multi_api_server(settings, sock, lambda: _make_supervisor(settings, engines), begun)
        with heap_trimmer.pause_gc():
            supervisor = _make_supervisor(settings, engines)
            app = find_app(settings.server.app)(settings, supervisor)
        for path, methods in list_routes(app):
            log.info("Route: %s, Methods: %s", path, methods)
        # Objects of start-up live for ever; without freeze, each full collection during a stream would traverse them.
        gc.collect()
        gc.freeze()
        log.info("app built (%.1f s)", time.monotonic() - begun)
        return SingleProcessServer(settings, supervisor, app, sock).run_to_end()
    finally:
        end_engines(handles)


def _make_supervisor(settings: Settings, engines: StartedEngines) -> Supervisor | Fleet:
    return supervise(settings.server, engines.configs, engines.handles, settings.server.sleep_after)


def supervise(
    server: ServerConfig, configs: Sequence[EngineConfig], handles: Sequence[EngineHandle], sleep_after: float = 0.0
) -> Supervisor | Fleet:
    """Makes the supervisor of one engine, or the fleet of several; ``sleep_after`` as in ``Supervisor``."""
    from trencadis.server.engine.supervisor import Supervisor

    options: dict[str, Any] = {
        "compile_timeout": server.compile_timeout,
        "max_restarts": server.max_engine_restarts,
        "sleep_after": sleep_after,
    }
    if len(configs) == 1:
        return Supervisor(configs[0], handles[0], **options)
    from trencadis.server.processes.multi_engine_client import Fleet

    return Fleet(configs, handles, **options)


def end_engines(handles: Sequence[EngineHandle]) -> None:
    """Kills engines that still run, also after an interrupted start-up; the supervisor has ended restarted ones."""
    signals_and_logging.ignore_signals()
    for handle in handles:
        if handle.process.poll() is None:
            handle.kill()
