"""Placement of engines on a Ray cluster: each on one node with all its ranks, or at the node of its first rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.devices import RESOURCES, likely
from trencadis.core.executor.on_ray import ray_cluster
from trencadis.core.executor.on_ray.ray_cluster import ClusterNode
from trencadis.server.engine.on_ray.engine_actor import EngineActor


def get_ray_resource(config: EngineConfig) -> str:
    """Returns the name of the Ray resource that a rank takes."""
    return RESOURCES.get(likely(config.device), likely(config.device).upper())


class EnginePlacement:
    """A placement group with a bundle of cards for each engine, which is on one node with all its ranks.

    This process needs no cards. Ray ends actors and group when it ends.

    Args:
        config: configuration of every engine.

    Attributes:
        host: this node's address.
        max_per_node: number of engines on the node with most of them.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    on_this_node = False
    """False: Ray chooses the nodes of the actors."""

    def __init__(self, config: EngineConfig, engines: int, environ: Mapping[str, str]) -> None:
        self._resource = get_ray_resource(config)
        self._ranks = config.ranks
        self.ray = ray_cluster.connect(environ)
        nodes = ray_cluster.await_free_nodes(self.ray, self._resource, engines * self._ranks)
        self.nodes = ray_cluster.assign_engine_nodes(nodes, engines, self._ranks, self._resource)
        self.host = next(n.address for n in ray_cluster.nodes_of(self.ray, self._resource) if n.here)
        self.max_per_node = max(Counter(node.id for node in self.nodes).values())
        self._group = ray_cluster.create_engine_group(self.ray, engines, self._ranks, self._resource)

    def create_actor(self, number: int) -> tuple[Any, Mapping[str, str]]:
        """Creates an actor in an engine's bundle; its process needs no variables."""
        return ray_cluster.create_actor_in_bundle(
            self.ray, EngineActor, self._group, number, self._resource, self._ranks
        ), {}

    def close(self) -> None:
        """Returns all resources to Ray."""
        ray_cluster.remove_group(self._group)


class MultiNodePlacement:
    """Placement of one engine whose ranks may span several nodes.

    The engine's process runs rank 0, so it must be on a node with a card; the server's own node needs none. The actor
    that
    runs the process takes no resources of its node: the process itself requests cards from Ray, on whichever node it
    is.

    Attributes:
        node: node of the first engine; ``on_this_node``: True if it is this one.
        host: this node's address.

    Raises:
        StartupError: there is no cluster, or it has not enough cards.
    """

    max_per_node = 1

    def __init__(self, config: EngineConfig, engines: int, environ: Mapping[str, str]) -> None:
        assert engines == 1
        self._config, self._resource = config, get_ray_resource(config)
        self.ray = ray_cluster.connect(environ)
        self.node = self._choose_node()
        self.host = next(n.address for n in ray_cluster.nodes_of(self.ray, self._resource) if n.here)
        self.on_this_node = self.node.here

    def _choose_node(self) -> ClusterNode:
        """Chooses the node of an engine that starts now; waits for the cards of one that has just ended."""
        size, groups = self._config.tensor_parallel_size, self._config.pipeline_parallel_size
        nodes = ray_cluster.await_free_nodes(self.ray, self._resource, groups * size)
        return ray_cluster.choose_lead_node(nodes, groups, size, self._resource, self._config.allow_tp_over_nodes)

    def create_actor(self, number: int) -> tuple[Any, Mapping[str, str]]:
        """Creates an actor on the node that is best now, with variables that name this cluster and its node."""
        node = self._choose_node()
        found = {"RAY_ADDRESS": self.ray.get_runtime_context().gcs_address, ray_cluster.OWN_NODE: node.id}
        return ray_cluster.create_actor_on_node(self.ray, EngineActor, node.id), found
