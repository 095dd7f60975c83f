"""Places whole engines on the nodes of a Ray cluster, each as an actor.

An engine is on one node with all its ranks, or at the node of its first rank; its actor holds its cards, or none, runs
its process and relays its bytes, which do not pass through Ray.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trencadis.core.devices import CARD_VARIABLES, RESOURCES, likely
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages, ray_access_and_node_placement
from trencadis.core.executor.engine_process_launcher import EngineHandle, spawn_engine
from trencadis.core.executor.headless_ranks import connect_to_engine
from trencadis.core.executor.rank_info_and_fingerprint import (
    RankFingerprint,
    compute_rank_fingerprint,
    describe_differences,
)
from trencadis.core.executor.ray_access_and_node_placement import ClusterNode
from trencadis.core.links.authenticated_link import Relay
from trencadis.core.process import engine_messages


class EngineActor:
    """Actor in one bundle of the placement group, or on the node of an engine that requests cards from Ray itself."""

    def __init__(self) -> None:
        self._handle: EngineHandle | None = None
        self._relay: Relay | None = None

    def start(
        self, connect_info: bytes, start: bytes, server_fingerprint: Sequence[str], environ: Mapping[str, str]
    ) -> str:
        """Starts the engine's process and connects to the server; returns the error, else an empty string.

        Args:
            connect_info: an encoded ``ConnectInfo`` frame; ``start``: an encoded ``Start`` frame.
            server_fingerprint: the server's ``RankFingerprint``, field by field.
            environ: variables of the process.
        """
        target, asked = rank_messages.decode_down(connect_info), engine_messages.decode_down(start)
        assert isinstance(target, rank_messages.ConnectInfo)
        assert isinstance(asked, engine_messages.Start)
        try:
            own_print, server_print = compute_rank_fingerprint(asked.config.model), RankFingerprint(*server_fingerprint)
            if server_print.torch == "none":  # a server without cards needs no torch
                server_print = dataclasses.replace(server_print, torch=own_print.torch)
            differ = describe_differences(server_print, own_print)
            if differ:
                return f"the engine on {platform.node()} cannot join: {differ}; every node needs the same"
            os.environ.update(environ)
            # Ray sets it to the CPUs of an actor, which are none for actors with cards
            os.environ.pop("OMP_NUM_THREADS", None)
            for name in CARD_VARIABLES:  # Ray hides cards from an actor without cards, but the engine gets one later
                if os.environ.get(name) == "":
                    del os.environ[name]
            self._handle = spawn_engine(asked.config)
        except StartupError as error:
            return f"{platform.node()}: {error}"
        try:
            link = connect_to_engine(target)
        except StartupError as error:
            self._end()
            return (
                f"the engine on {platform.node()} does not reach the server at {target.address}:{target.port}: nodes "
                f"must "
                f"reach all its ports ({error})"
            )
        self._relay = Relay(self._handle.sock, link, lambda why: self._end())
        return ""

    def _end(self) -> None:
        """Kills the engine process, which would end by itself once its socket is closed, but not while it holds the
        GIL.
        """
        if self._handle is not None:
            self._handle.kill()


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
        self.ray = ray_access_and_node_placement.connect(environ)
        nodes = ray_access_and_node_placement.await_free_nodes(self.ray, self._resource, engines * self._ranks)
        self.nodes = ray_access_and_node_placement.assign_engine_nodes(nodes, engines, self._ranks, self._resource)
        self.host = next(n.address for n in ray_access_and_node_placement.nodes_of(self.ray, self._resource) if n.here)
        self.max_per_node = max(Counter(node.id for node in self.nodes).values())
        self._group = ray_access_and_node_placement.create_engine_group(self.ray, engines, self._ranks, self._resource)

    def create_actor(self, number: int) -> tuple[Any, Mapping[str, str]]:
        """Creates an actor in an engine's bundle; its process needs no variables."""
        return ray_access_and_node_placement.create_actor_in_bundle(
            self.ray, EngineActor, self._group, number, self._resource, self._ranks
        ), {}

    def close(self) -> None:
        """Returns all resources to Ray."""
        ray_access_and_node_placement.remove_group(self._group)


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
        self.ray = ray_access_and_node_placement.connect(environ)
        self.node = self._choose_node()
        self.host = next(n.address for n in ray_access_and_node_placement.nodes_of(self.ray, self._resource) if n.here)
        self.on_this_node = self.node.here

    def _choose_node(self) -> ClusterNode:
        """Chooses the node of an engine that starts now; waits for the cards of one that has just ended."""
        size, groups = self._config.tensor_parallel_size, self._config.pipeline_parallel_size
        nodes = ray_access_and_node_placement.await_free_nodes(self.ray, self._resource, groups * size)
        return ray_access_and_node_placement.choose_lead_node(
            nodes, groups, size, self._resource, self._config.allow_tp_over_nodes
        )

    def create_actor(self, number: int) -> tuple[Any, Mapping[str, str]]:
        """Creates an actor on the node that is best now, with variables that name this cluster and its node."""
        node = self._choose_node()
        found = {
            "RAY_ADDRESS": self.ray.get_runtime_context().gcs_address,
            ray_access_and_node_placement.OWN_NODE: node.id,
        }
        return ray_access_and_node_placement.create_actor_on_node(self.ray, EngineActor, node.id), found
