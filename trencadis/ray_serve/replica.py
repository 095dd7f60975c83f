"""One replica of Ray Serve: the whole server without a port, over its own engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from trencadis.core.errors import StartupError
from trencadis.ray_serve.policy import KV_USE, WAIT, WaitEstimator

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import StreamingResponse

    from trencadis.server.engine.spawn import EngineHandle

POLL_SECONDS = 0.1
"""Interval in seconds between checks of an engine that is loading."""

MAX_QUEUED_PIECES = 64
"""Maximum number of response pieces that are queued for the client."""


class ServedReplica:
    """Class of the deployment. A replica is up once ``/ready`` would succeed, and drains before it ends.

    Args:
        words: flags of ``trencadis serve``.
    """

    async def __init__(self, words: Sequence[str]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        from trencadis.core.links.topology import on_this_machine
        from trencadis.server.cli import serve
        from trencadis.server.config import argv
        from trencadis.server.config.resolve_settings import resolve_settings
        from trencadis.server.processes import logging_setup, server_lifecycle
        from trencadis.server.processes.start_engines import start_engines

        self._failed, self._wait_estimator = "", WaitEstimator()
        settings = serve.find_model(resolve_settings(argv.parse(list(words)), os.environ))
        logging_setup.set_up_logging(settings.engine, settings.server)
        self._drain_timeout = settings.server.shutdown_timeout
        server = settings.server
        self._handles: list[EngineHandle] = []
        engines = start_engines(on_this_machine(settings.engine), server.data_parallel_size, "mp", self._handles.append)
        self.supervisor = serve.supervise(server, engines.configs, engines.handles, server.sleep_after)
        self.supervisor.on_fatal = self._on_fatal
        self.app: Any = server_lifecycle.find_app(settings.server.app)(settings, self.supervisor)
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        self.supervisor.start()
        while not self.supervisor.ready:
            if self._failed:
                raise StartupError(self._failed)
            await asyncio.sleep(POLL_SECONDS)

    def _on_fatal(self, message: str, code: int) -> None:
        self._failed = message

    async def __call__(self, request: Request) -> StreamingResponse:
        """Answers a request, streaming the response in the pieces that the app sends."""
        from starlette.responses import StreamingResponse

        begun: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_QUEUED_PIECES)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.set_result(message)
                return
            if message.get("body"):
                await pieces.put(message["body"])
            if not message.get("more_body"):
                await pieces.put(None)

        task = asyncio.ensure_future(self.app(request.scope, request.receive, send))
        await asyncio.wait([begun, task], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            await task
            raise RuntimeError("the app ended without an answer")
        head = begun.result()

        async def body() -> AsyncIterator[bytes]:
            try:
                while (piece := await pieces.get()) is not None:
                    yield piece
            finally:
                task.cancel()  # a client that disconnects ends its request
                await asyncio.gather(task, return_exceptions=True)

        answer = StreamingResponse(body(), head["status"])
        answer.raw_headers = list(head["headers"])
        return answer

    def check_health(self) -> None:
        """Raises RuntimeError if only a new replica can help; a replica whose engine is restarting stays healthy."""
        if self.supervisor.failing or self._failed:
            raise RuntimeError(self._failed or "engines fail again and again")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the values for ``trencadis.ray_serve.policy``."""
        stats, links = self.supervisor.stats, getattr(self.supervisor, "engines", [self.supervisor])
        waiting = max(stats.waiting - stats.deferred, 0)
        wait = self._wait_estimator.estimate(sum(one.link.submitted for one in links), waiting, time.monotonic())
        return {WAIT: wait, KV_USE: stats.kv_used / stats.kv_total if stats.kv_total else 0.0}

    async def __del__(self) -> None:
        """Finishes running requests and stops the engine."""
        if not hasattr(self, "supervisor"):
            return
        await self.supervisor.drain(self._drain_timeout)
        await self.supervisor.stop()
        await self._lifespan.__aexit__(None, None, None)
