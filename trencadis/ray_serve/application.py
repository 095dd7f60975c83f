"""Builds an application of Ray Serve from arguments.

A replica is the whole server without a port, over its own engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from trencadis.core.devices import likely
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.ray_serve.autoscaling_policy import KV_USE, WAIT, WaitEstimator
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import resolve_settings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import StreamingResponse

    from trencadis.core.executor.engine_process_launcher import EngineHandle


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
        from trencadis.core.links.rank_placement import on_this_machine
        from trencadis.server.cli import serve
        from trencadis.server.config import command_line_parser
        from trencadis.server.config.resolve_settings import resolve_settings
        from trencadis.server.processes import server_lifecycle, signals_and_logging
        from trencadis.server.processes.start_engines import start_engines

        self._failed, self._wait_estimator = "", WaitEstimator()
        settings = serve.find_model(resolve_settings(command_line_parser.parse(list(words)), os.environ))
        signals_and_logging.set_up_logging(settings.engine, settings.server)
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
        """Returns the values for ``trencadis.ray_serve.autoscaling_policy``."""
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


DEPLOYMENT = "deployment"

ROUTING_NOTE = (
    "Ray Serve chooses a replica before it has read a request: the shorter queue of two at random, whatever prefixes "
    "and images replicas hold; --data-parallel-backend ray is one server whose router knows them"
)

log = logging.getLogger("trencadis.server")


def build(args: JsonMapping) -> Any:
    """Builds the application: one deployment, each of whose replicas is a whole server with an engine.

    Args:
        args: flags of ``trencadis serve`` by name, as in a ``--config`` file (``model``, ``max_model_len``), and
            ``deployment``: options of Ray Serve's deployment (``num_replicas``, ``autoscaling_config``,
            ``ray_actor_options``). Devices are requested automatically.

    Raises:
        StartupError: a flag is wrong, or does not apply to a replica.
    """
    try:
        serve: Any = import_module("ray.serve")
    except ImportError:
        raise StartupError("Ray Serve is not installed: pip install 'ray[serve]', of the cluster's version") from None
    given = dict(args)
    options = given.pop(DEPLOYMENT, {})
    options = json.loads(options) if isinstance(options, str) else dict(options)
    line = to_command_line(given)
    engine = check_flags(line)
    options.setdefault("name", "trencadis")
    options.setdefault("ray_actor_options", actor_options(engine))
    options.setdefault("max_ongoing_requests", 2 * (engine.max_num_seqs or 128))
    options.setdefault("graceful_shutdown_timeout_s", 600.0)
    if options.get("num_replicas", 1) != 1 or options.get("autoscaling_config"):
        log.info("%s", ROUTING_NOTE)
    return serve.deployment(**options)(ServedReplica).bind(line)


def to_command_line(flags: JsonMapping) -> list[str]:
    """Returns flags as the arguments of a command line."""
    found: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.strip("-").replace("_", "-")
        text = str(value).strip().lower()  # `serve run` passes strings, YAML values; 1 is not true
        if value is None:
            continue
        if text in ("true", "false"):
            found.append(flag if text == "true" else "--no-" + flag[2:])
        elif isinstance(value, dict):
            found += [flag, json.dumps(value)]
        else:
            found += [flag, *map(str, value if isinstance(value, list) else [value])]
    return found


def check_flags(line: list[str]) -> EngineConfig:
    """Returns the engine's configuration from the flags; checks them while the application is built, before a replica
    fails on them.

    Raises:
        StartupError: a flag is wrong, or contradicts Ray Serve.
    """
    settings = resolve_settings(command_line_parser.parse(line), os.environ)
    server, engine = settings.server, settings.engine
    if engine.distributed_executor_backend == "ray" or engine.nnodes > 1:
        raise StartupError(
            "a replica of Ray Serve has its ranks in its own node; leave out --distributed-executor-backend"
        )
    if server.data_parallel_backend == "ray":
        raise StartupError("Ray Serve has the replicas: leave out --data-parallel-backend, and name num_replicas")
    if server.ssl_certfile or server.uds:
        raise StartupError("Ray Serve's proxy has the port: leave out --ssl-certfile and --uds")
    return engine


def actor_options(engine: EngineConfig) -> JsonObject:
    """Returns the resources that a replica needs on its node: a device per rank, or CPUs for its threads."""
    ranks = engine.ranks
    device = likely(engine.device)
    if device == "cuda":
        return {"num_cpus": 1, "num_gpus": ranks}
    if device == "cpu":
        return {"num_cpus": engine.threads or 1}
    return {"num_cpus": 1, "resources": {device.upper(): ranks}}
