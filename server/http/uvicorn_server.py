"""uvicorn with our sockets, signals and log format."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import typing
from collections.abc import Generator
from typing import TYPE_CHECKING

import uvicorn

from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.h11_connection import LimitedH11Protocol
from trencadis.server.http.listener import BACKLOG, Certificates
from trencadis.server.http.pending_request_heads_by_tenant import SharedLimits, find_tenant_name

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.server.routes.app_state import AppState


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers: with those of ``server/cli``, a drained server exits with code 0.

    Args:
        certificates: None for plain HTTP.
        watches: True if it checks for new certificates by itself.
    """

    def __init__(self, config: uvicorn.Config, certificates: Certificates | None = None, watches: bool = False) -> None:
        super().__init__(config)
        self.certificates = certificates
        self._watches = watches

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until ``leave`` is called."""
        watch = None
        if self.certificates is not None and self._watches:
            watch = asyncio.create_task(self.certificates.watch())
        try:
            await super().serve(sockets)
        finally:
            if watch is not None:
                watch.cancel()

    def leave(self, seconds: int) -> None:
        """Shuts the server down once it has started; before that, the lifespan would not be closed.

        Args:
            seconds: time for the last answers.
        """
        self.config.timeout_graceful_shutdown = seconds
        if self.started:
            self.should_exit = True
        else:
            asyncio.get_running_loop().call_later(0.02, self.leave, seconds)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves the signal handlers unchanged, unlike uvicorn's own method."""
        yield


def make_server(server: ServerConfig, app: FastAPI, flush_seconds: int, share: int = 1) -> WebServer:
    """Makes the uvicorn server of ``app``.

    Args:
        flush_seconds: time to write the last responses once the engine is done.
        share: number of processes among which the bytes of unfinished request heads are divided.

    Raises:
        StartupError: a certificate cannot be used.
    """
    certificates = Certificates(server) if server.ssl_certfile else None
    # uvicorn calls the class with its own arguments only, so a partial adds ours.
    limits = SharedLimits(server.receive_timeout)
    limits.bound //= share
    limits.most_lines = server.h11_max_header_count
    state: AppState | None = getattr(app.state, "trencadis", None)
    if state is not None:
        limits.count_refusal = state.metrics.http.count_refusal
    if state is not None and state.fair_queue is not None and state.tenants is not None:
        limits.deferred.get_tenant = functools.partial(find_tenant_name, state.tenants)
    connection = typing.cast("type[LimitedH11Protocol]", functools.partial(LimitedH11Protocol, limits))
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
        forwarded_allow_ips=",".join(server.forwarded_allow_ips),
        timeout_keep_alive=server.timeout_keep_alive,
        timeout_graceful_shutdown=flush_seconds,
        h11_max_incomplete_event_size=server.h11_max_incomplete_event_size,
        server_header=False,
    )
    config.load()
    # uvicorn would make its context from the files, once.
    if certificates is not None:
        config.ssl = certificates.context
    return WebServer(config, certificates, server.enable_ssl_refresh)
