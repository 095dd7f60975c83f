"""Which launcher a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.core.config import EngineConfig
from trencadis.core.executor.groups import serve_store
from trencadis.core.executor.launcher import Launcher, LocalLauncher
from trencadis.core.executor.nodes import NodesLauncher, open_door
from trencadis.core.links.topology import RAY, Topology


def launcher_of(config: EngineConfig, lie: Topology, environ: Mapping[str, str]) -> Launcher:
    """The launcher of a group whose ranks lie so.

    Raises:
        StartupError: an address, a key or a file is no good.
    """
    if lie.backend == RAY:
        from trencadis.core.executor.on_ray.launcher import RayLauncher  # needs the extra

        made = RayLauncher(config, lie, environ)
        try:
            made.rendezvous = serve_store(made.host, lie.world)
        except BaseException:
            made.close()
            raise
        return made
    if not lie.over_hosts:
        return LocalLauncher(config, lie.world)
    door, key_file = open_door(config, lie, environ)
    try:
        return NodesLauncher(config, lie, door, serve_store(door.address[0], lie.world), key_file)
    except BaseException:
        door.close()
        raise
