"""uvicorn with our sockets, signals and log format."""

from __future__ import annotations

import contextlib
import functools
import ssl
import typing
from collections.abc import Generator
from typing import TYPE_CHECKING

import uvicorn

from trencadis.server.config.config import ServerConfig
from trencadis.server.http.connection import Connection, SharedLimits
from trencadis.server.http.listen import BACKLOG

if TYPE_CHECKING:
    from fastapi import FastAPI


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers: with those of ``server/cli``, a drained server exits with code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures no signal."""
        yield


def make_server(server: ServerConfig, app: FastAPI, flush_seconds: int) -> WebServer:
    """``flush_seconds``: time to write the last responses once the engine is done."""
    # uvicorn calls the class with its own arguments only, so a partial carries ours.
    connection = typing.cast("type[Connection]", functools.partial(Connection, SharedLimits(server.receive_timeout)))
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=server.uvicorn_log_level,
        access_log=not server.disable_uvicorn_access_log,
        lifespan="on",
        ws="none",
        http=connection,
        backlog=BACKLOG,
        root_path=server.root_path,
        timeout_keep_alive=server.timeout_keep_alive,
        timeout_graceful_shutdown=flush_seconds,
        h11_max_incomplete_event_size=server.h11_max_incomplete_event_size,
        ssl_keyfile=server.ssl_keyfile or None,
        ssl_certfile=server.ssl_certfile or None,
        ssl_ca_certs=server.ssl_ca_certs or None,
        ssl_cert_reqs=ssl.VerifyMode(server.ssl_cert_reqs),
        ssl_ciphers=server.ssl_ciphers or None,
        server_header=False,
    )
    return WebServer(config)
