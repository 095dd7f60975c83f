"""Targets of a batch's requests: an engine of its own, through the server's whole app, or a running server.

Files of a batch at URLs: input is downloaded into a file first, output is uploaded once complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from trencadis.core.errors import StartupError
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.process import heap_trimmer
from trencadis.server.config.resolve_settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.core.engine_config import EngineConfig
    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.processes.multi_engine_client import Fleet


TRIES = 5
PAUSE = 5.0
PIECE = 1 << 20
TIMEOUT = httpx.Timeout(60.0)


def is_url(name: str) -> bool:
    """Returns True if ``name`` is a URL and not a path."""
    return name.startswith(("http://", "https://"))


def redact_url(url: str) -> str:
    """Returns a URL without the parts that may be secret: user, password, and a signed query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def download(url: str, path: Path) -> None:
    """Downloads ``url`` to ``path``.

    Raises:
        StartupError: it cannot be fetched.
    """
    for left in reversed(range(TRIES)):
        try:
            with httpx.stream("GET", url, timeout=TIMEOUT, follow_redirects=True) as response:
                _check(response, url)
                with path.open("wb") as file:
                    for piece in response.iter_bytes(PIECE):
                        file.write(piece)
            return
        except httpx.HTTPError as error:
            if not left:
                raise StartupError(f"{redact_url(url)} could not be fetched ({type(error).__name__}).") from None
            time.sleep(PAUSE)


def upload(path: Path, url: str) -> None:
    """Uploads a file by PUT.

    Raises:
        StartupError: it cannot be sent; the file stays.
    """

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    headers = {"content-type": "application/jsonl", "content-length": str(path.stat().st_size)}
    for left in reversed(range(TRIES)):
        try:
            _check(httpx.put(url, content=pieces(), headers=headers, timeout=TIMEOUT), url)
            return
        except httpx.HTTPError as error:
            if not left:
                what = f"{redact_url(url)} did not take the output ({type(error).__name__})"
                raise StartupError(f"{what}; it lies in {path}.") from None
            time.sleep(PAUSE)


def _check(response: httpx.Response, url: str) -> None:
    """Raises StartupError for an error that a retry does not change, HTTPError for one that it may change."""
    if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
        raise StartupError(f"{redact_url(url)}: the server answered {response.status_code}.")
    if not response.is_success:
        raise httpx.ReadError(f"{response.status_code}")


POLL = 0.2
GONE_SECONDS = 1800.0
"""Maximum seconds for which a running server may be unreachable before the batch ends."""
KEYS = ("VLLM_API_KEY", "OPENAI_API_KEY")
ALIVE = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60))
"""Keep-alive options: a server whose machine is gone sends nothing, and an answer may take any time."""


def find_api_key(environ: dict[str, str] | None = None) -> str:
    """Returns the API key in the environment; "" without one."""
    found = dict(os.environ) if environ is None else environ
    return next((found[name] for name in KEYS if found.get(name)), "")


class RunningServer:
    """A server at ``url``, with or without ``/v1``."""

    def __init__(self, url: str, api_key: str, connections: int, gone_seconds: float = GONE_SECONDS) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.gone_seconds = gone_seconds
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self.client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=30.0),
            transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=ALIVE),
        )

    async def wait_ready(self) -> None:
        """Waits until ``/health`` answers below 500, for at most ``gone_seconds``.

        Raises:
            StartupError: it does not come back.
        """
        end, why = time.monotonic() + self.gone_seconds, ""
        while True:
            try:
                status = (await self.client.get("/health", timeout=10.0)).status_code
                if status < 500:
                    return
                why = f"/health answers {status}"
            except httpx.TransportError as error:
                why = type(error).__name__
            if time.monotonic() >= end:
                raise StartupError(f"no server answers at {redact_url(self.url)} ({why}); --resume goes on from here.")
            await asyncio.sleep(POLL)


class LocalEngine:
    """The server's app over its own engine, without a socket."""

    def __init__(self, app: FastAPI, supervisor: Supervisor | Fleet) -> None:
        self.app, self.supervisor = app, supervisor
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)
        self.fatal = ""
        supervisor.on_fatal = self._on_engine_failed

    def _on_engine_failed(self, message: str, code: int) -> None:
        self.fatal = message or "the engine ended while it started"

    async def wait_ready(self) -> None:
        """Waits until the engine takes requests.

        Raises:
            StartupError: it cannot start, or repeatedly ends.
        """
        while not self.supervisor.accepting:
            if self.fatal:
                raise StartupError(self.fatal)
            if self.supervisor.failing or (self.supervisor.task is not None and self.supervisor.task.done()):
                raise StartupError("the engine ends again and again; --resume goes on from here.")
            await asyncio.sleep(POLL)


def make_private_settings(settings: Settings) -> Settings:
    """Returns the settings of an app that only this process calls: no keys, no page, no prefix of a proxy."""
    server = dataclasses.replace(settings.server, api_key=[], api_key_file="", disable_page=True, root_path="")
    return dataclasses.replace(settings, server=server)


@contextlib.asynccontextmanager
async def start_local_engine(
    settings: Settings, configs: Sequence[EngineConfig], handles: Sequence[EngineHandle]
) -> AsyncIterator[LocalEngine]:
    """Runs the app over engine processes, which may still load; ends them afterwards.

    Raises:
        StartupError: the checkpoint lacks something, or a flag does not fit it.
    """
    from trencadis.server.cli.serve import supervise
    from trencadis.server.processes.server_lifecycle import find_app

    supervisor = supervise(settings.server, configs, handles)
    app = find_app(settings.server.app)(settings, supervisor)
    gc.collect()
    gc.freeze()
    target = LocalEngine(app, supervisor)
    supervisor.start()
    tidy = asyncio.create_task(heap_trimmer.run_trimmer(lambda: supervisor.stats.steps))
    try:
        async with app.router.lifespan_context(app):
            yield target
    finally:
        tidy.cancel()
        await target.client.aclose()
        await supervisor.stop()


@contextlib.asynccontextmanager
async def connect_to_server(url: str, api_key: str, connections: int) -> AsyncIterator[RunningServer]:
    """Connects to a running server.

    Raises:
        StartupError: nothing answers there now.
    """
    target = RunningServer(url, api_key, connections, 0.0)
    async with target.client:
        await target.wait_ready()
        target.gone_seconds = GONE_SECONDS
        yield target
