"""Where engines go on a Ray cluster: each on one node with all its ranks, or to the node of its first rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.devices import RESOURCES, likely
from trencadis.core.executor.on_ray import cluster
from trencadis.core.executor.on_ray.cluster import ClusterNode
from trencadis.server.engine.on_ray.actor import EngineActor


def resource_of(config: EngineConfig) -> str:
    """What a rank takes of a node."""
    return RESOURCES.get(likely(config.device), likely(config.device).upper())


class Placement:
    """A placement group with a bundle of cards for each engine, which is on one node with all its ranks.

    This process needs no cards. Ray ends actors and group where it ends.

    Args:
        config: of every engine.

    Attributes:
        host: this node's address.
        crowd: engines on the fullest node.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    here = False
    """The actors' nodes are Ray's to choose."""

    def __init__(self, config: EngineConfig, engines: int, environ: Mapping[str, str]) -> None:
        self._resource = resource_of(config)
        self._ranks = config.ranks
        self.ray = cluster.connect(environ)
        nodes = cluster.settled(self.ray, self._resource, engines * self._ranks)
        self.nodes = cluster.share(nodes, engines, self._ranks, self._resource)
        self.host = next(n.address for n in cluster.nodes_of(self.ray, self._resource) if n.here)
        self.crowd = max(Counter(node.id for node in self.nodes).values())
        self._group = cluster.bundles(self.ray, engines, self._ranks, self._resource)

    def actor(self, number: int) -> tuple[Any, Mapping[str, str]]:
        """A new actor in an engine's bundle, whose process needs no variables."""
        return cluster.taking(self.ray, EngineActor, self._group, number, self._resource, self._ranks), {}

    def close(self) -> None:
        """Gives everything back to Ray."""
        cluster.release(self._group)


class Lead:
    """Puts one engine whose ranks may be on several nodes (``--distributed-executor-backend ray``) on a node of theirs.

    The engine's process holds rank 0, so it must be where a card is; the server's own node needs none. The actor that
    runs the process takes nothing of its node: the process itself asks Ray for cards, on whichever node it is.

    Attributes:
        node: where a first engine goes; ``here``: whether it is this one.
        host: this node's address.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    crowd = 1

    def __init__(self, config: EngineConfig, engines: int, environ: Mapping[str, str]) -> None:
        assert engines == 1
        self._config, self._resource = config, resource_of(config)
        self.ray = cluster.connect(environ)
        self.node = self._choose()
        self.host = next(n.address for n in cluster.nodes_of(self.ray, self._resource) if n.here)
        self.here = self.node.here

    def _choose(self) -> ClusterNode:
        """The node of an engine that is started now; cards of one that has just ended are waited for."""
        size, groups = self._config.tensor_parallel_size, self._config.pipeline_parallel_size
        nodes = cluster.settled(self.ray, self._resource, groups * size)
        return cluster.lead(nodes, groups, size, self._resource, self._config.allow_tp_over_nodes)

    def actor(self, number: int) -> tuple[Any, Mapping[str, str]]:
        """A new actor on the node that is best now; its process finds this cluster, and knows its node."""
        node = self._choose()
        found = {"RAY_ADDRESS": self.ray.get_runtime_context().gcs_address, cluster.OWN_NODE: node.id}
        return cluster.beside(self.ray, EngineActor, node.id), found
