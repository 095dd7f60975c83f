"""A scripted application behind the real HTTP server, on loopback and in a thread: what official clients connect to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.fakes.scripted_app import ScriptedApp
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.listener import open_listener
from trencadis.server.http.uvicorn_server import make_server

DEADLINE = 30.0
"""Seconds in which the server must come up and end."""


@contextlib.contextmanager
def live(harness: ScriptedApp, **flags: Any) -> Iterator[str]:
    """The base URL of the application, while it is served; ``flags``: what the HTTP server itself is told."""
    config = ServerConfig(**{"host": "127.0.0.1", "port": 0, "disable_uvicorn_access_log": True, **flags})
    sock = open_listener(config)
    server = make_server(config, harness.made or harness.app(), 5)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    try:
        yield f"http{'s' if config.ssl_certfile else ''}://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        sock.close()
        assert not thread.is_alive()
