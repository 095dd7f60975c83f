"""Starts the engines of a server, here or on a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.links import topology
from trencadis.server.engine.spawn import EngineHandle, spawn_engine
from trencadis.server.fleet.resources import divide_resources, divide_resources_over_nodes

if TYPE_CHECKING:
    from trencadis.server.engine.on_ray.cluster_engines import RayEngines

log = logging.getLogger("trencadis.server")

RAY = "ray"


@dataclass(frozen=True)
class StartedEngines:
    """Configurations of the engines, and their processes, which may still be starting."""

    configs: list[EngineConfig]
    handles: list[EngineHandle]


def start_engines(
    config: EngineConfig, size: int, backend: str, begun: Callable[[EngineHandle], None]
) -> StartedEngines:
    """Starts ``size`` engines.

    Args:
        backend: ``mp`` or ``ray``, as ``--data-parallel-backend`` says.
        begun: called with each engine, so that those that started are ended if another one fails.

    Raises:
        StartupError: an engine cannot start, or the cluster has not enough free resources.
    """
    handles: list[EngineHandle] = []
    if backend == RAY:
        if config.distributed_executor_backend == RAY or config.nnodes > 1:
            raise StartupError(
                "--data-parallel-backend ray puts each engine on one node with all its ranks: leave out "
                "--distributed-executor-backend ray and --nnodes"
            )
        config = topology.on_this_machine(config)
        cluster = _reserve_on_ray(config, size)
        start_on_ray, configs = cluster.start_engine, divide_resources_over_nodes(config, size, cluster.max_per_node)
    else:
        config, line = topology.choose_executor_backend(config, os.environ)
        if line:
            log.warning("%s", line)
        start_on_ray, configs = None, divide_resources(config, size)
    for number, one in enumerate(configs):
        handles.append(_start_engine(one, size) if start_on_ray is None else start_on_ray(number, one))
        begun(handles[-1])
    return StartedEngines(configs, handles)


def _reserve_on_ray(config: EngineConfig, size: int, multi_node: bool = False) -> RayEngines:
    """Reserves resources for ``size`` engines on a Ray cluster."""
    # Imported late: it imports numpy, which would delay an engine on this machine.
    from trencadis.server.engine.on_ray.cluster_engines import RayEngines

    return RayEngines(config, size, multi_node=multi_node)


def _start_engine(config: EngineConfig, size: int) -> EngineHandle:
    """Starts an engine here, or on a node of the Ray cluster with a card for its first rank if this node has none."""
    if config.distributed_executor_backend == RAY and size == 1:
        cluster = _reserve_on_ray(config, 1, multi_node=True)
        if not cluster.on_this_node:
            return cluster.start_engine(0, config)
        cluster.close()  # the engine requests its ranks by itself
    return spawn_engine(config)
