"""Starts the engines of a server, here or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.server.engine.spawn import EngineHandle, spawn
from trencadis.server.fleet.deal import deal, deal_to_nodes

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
        from trencadis.server.engine.on_ray.placing import Placement  # needs the extra

        placement = Placement(config, size, os.environ)
        configs = deal_to_nodes(config, size, placement.crowd)
    else:
        placement, configs = None, deal(config, size)
    for number, one in enumerate(configs):
        handles.append(spawn(one) if placement is None else placement.engine(number, one))
        begun(handles[-1])
    return Engines(configs, handles)
