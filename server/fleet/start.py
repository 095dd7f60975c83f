"""Starts the engines of a server, here or on a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.links import elsewhere
from trencadis.server.engine.spawn import EngineHandle, spawn
from trencadis.server.fleet.deal import deal, deal_to_nodes

if TYPE_CHECKING:
    from trencadis.server.engine.on_ray.cluster_engines import ClusterEngines

log = logging.getLogger("trencadis.server")

RAY = "ray"


@dataclass(frozen=True)
class Engines:
    """What each engine gets, and their processes, which may still be on their way."""

    configs: list[EngineConfig]
    handles: list[EngineHandle]


def start(config: EngineConfig, size: int, backend: str, begun: Callable[[EngineHandle], None]) -> Engines:
    """Starts ``size`` engines.

    Args:
        backend: ``mp`` or ``ray``, as ``--data-parallel-backend`` says.
        begun: told of each one, so that those that started end where another one does not.

    Raises:
        StartupError: an engine cannot start, or the cluster has no room.
    """
    handles: list[EngineHandle] = []
    if backend == RAY:
        if config.distributed_executor_backend == RAY or config.nnodes > 1:
            raise StartupError(
                "--data-parallel-backend ray puts each engine on one node with all its ranks: leave out "
                "--distributed-executor-backend ray and --nnodes"
            )
        config = elsewhere.on_this_machine(config)
        cluster = _cluster(config, size)
        placed, configs = cluster.engine, deal_to_nodes(config, size, cluster.crowd)
    else:
        config, line = elsewhere.settled(config, os.environ)
        if line:
            log.warning("%s", line)
        placed, configs = None, deal(config, size)
    for number, one in enumerate(configs):
        handles.append(_first(one, size) if placed is None else placed(number, one))
        begun(handles[-1])
    return Engines(configs, handles)


def _cluster(config: EngineConfig, size: int, lead: bool = False) -> ClusterEngines:
    """Places of ``size`` engines on a Ray cluster."""
    # It imports numpy, for which an engine on this machine would wait.
    from trencadis.server.engine.on_ray.cluster_engines import ClusterEngines

    return ClusterEngines(config, size, lead=lead)


def _first(config: EngineConfig, size: int) -> EngineHandle:
    """Starts an engine here, or where the Ray cluster has a card for its first rank and this node has none."""
    if config.distributed_executor_backend == RAY and size == 1:
        lead = _cluster(config, 1, lead=True)
        if not lead.here:
            return lead.engine(0, config)
        lead.close()  # the engine asks for its ranks by itself
    return spawn(config)
