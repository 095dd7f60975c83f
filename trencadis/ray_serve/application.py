"""Builds an application of Ray Serve from arguments; its replicas are ``trencadis.ray_serve.replica``."""

from __future__ import annotations

import json
import logging
import os
from importlib import import_module
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.devices import likely
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.ray_serve.replica import ServedReplica
from trencadis.server.config import argv
from trencadis.server.config.resolve_settings import resolve_settings

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
    settings = resolve_settings(argv.parse(line), os.environ)
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
