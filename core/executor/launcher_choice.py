"""Chooses the launcher of the ranks for a configuration."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.core.config import EngineConfig
from trencadis.core.executor.nodes_launcher import NodesLauncher, open_listener
from trencadis.core.executor.process_groups import serve_store
from trencadis.core.executor.rank_launcher import Launcher, LocalLauncher
from trencadis.core.links.topology import RAY, Topology


def launcher_of(config: EngineConfig, topology: Topology, environ: Mapping[str, str]) -> Launcher:
    """Returns the launcher for a group of ranks with this placement.

    Raises:
        StartupError: an address, a key or a file is unusable.
    """
    if topology.backend == RAY:
        from trencadis.core.executor.on_ray.ray_launcher import RayLauncher  # needs the extra

        made = RayLauncher(config, topology, environ)
        try:
            made.rendezvous = serve_store(made.host, topology.world)
        except BaseException:
            made.close()
            raise
        return made
    if not topology.over_hosts:
        return LocalLauncher(config, topology.world)
    listener, key_file = open_listener(config, topology, environ)
    try:
        return NodesLauncher(config, topology, listener, serve_store(listener.address[0], topology.world), key_file)
    except BaseException:
        listener.close()
        raise
