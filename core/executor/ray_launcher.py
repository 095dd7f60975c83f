"""Launches ranks and whole engines as actors of a Ray cluster.

The actor of a rank reserves its card and runs its process; it takes no part in Steps. An engine is on one node with all
its ranks, or at the node of its first rank; its actor holds its cards, or none, runs its process and relays its bytes,
which do not pass through Ray.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import ModuleType
from typing import Any, cast

from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.devices import CARD_VARIABLES, RESOURCES, likely
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages, ray_cluster
from trencadis.core.executor.engine_connection import HeadlessRanks, connect_to_engine
from trencadis.core.executor.engine_launcher import EngineHandle, spawn_engine
from trencadis.core.executor.nodes_launcher import RemoteRank, tls_files
from trencadis.core.executor.rank_info import RankFingerprint, RankInfo, compute_rank_fingerprint, describe_differences
from trencadis.core.executor.rank_launcher import RemoteRankState
from trencadis.core.executor.ray_cluster import ClusterNode
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.handshake import AuthListener
from trencadis.core.links.message_link import Link
from trencadis.core.links.rank_placement import Topology
from trencadis.core.links.socket_relay import Relay
from trencadis.core.process import engine_messages


class RankActor:
    """Holds one bundle of the placement group."""

    def __init__(self) -> None:
        self._ranks: HeadlessRanks | None = None

    def cards(self) -> dict[str, str]:
        """Returns the variables that list the cards which this actor may use."""
        return {name: os.environ[name] for name in CARD_VARIABLES if os.environ.get(name)}

    def start(self, target: bytes) -> None:
        """Starts the rank's process, which ends together with this actor."""
        info = rank_messages.decode_down(target)
        assert isinstance(info, rank_messages.ConnectInfo)
        self._ranks = HeadlessRanks([info])


class RayLauncher:
    """Creates a placement group with one actor per rank; rank 0's actor reserves the card of this process.

    Args:
        rendezvous: address of the ranks' store.

    Raises:
        StartupError: there is no cluster, or it has not enough free cards.
    """

    def __init__(self, config: EngineConfig, topology: Topology, environ: Mapping[str, str]) -> None:
        device = likely(config.device)
        self._config, self._world = config, topology.world
        self._resource = RESOURCES.get(device, device.upper())
        self._masked = device != "cpu"
        self._ray = ray_cluster.connect(environ)
        size = config.tensor_parallel_size
        found = ray_cluster.await_free_nodes(self._ray, self._resource, topology.world)
        self.nodes = ray_cluster.assign_nodes(
            found, topology.world // size, size, self._resource, config.allow_tp_over_nodes
        )
        self._group = ray_cluster.create_rank_group(self._ray, self.nodes, self._resource)
        self._key = GroupKey.generate()
        self.rendezvous = ""
        self.actors: dict[int, Any] = {}
        try:
            context = tls_files(config).context(server=True)
            self._listener = AuthListener((self.nodes[0].address, 0), self._key, range(1, topology.world), context)
            self._reserve_own_card()
        except BaseException:
            ray_cluster.remove_group(self._group)
            raise
        self.location_note = f"{self._listener.address[0]}:{self._listener.address[1]}"

    @property
    def host(self) -> str:
        """Address of this node."""
        return self.nodes[0].address

    def _reserve_own_card(self) -> None:
        """Adopts the card that Ray assigns to rank 0; no device has been opened in this process yet."""
        holder = self._actor(0)
        try:
            shown = self._ray.get(holder.cards.remote(), timeout=60)
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1][:300]
            raise StartupError(f"an actor of Ray cannot run Trencadis: {why}; install it on every node") from None
        if self._masked:
            os.environ.update(shown)

    def _actor(self, number: int) -> Any:
        made = ray_cluster.create_actor_in_bundle(self._ray, RankActor, self._group, number, self._resource, 1)
        self.actors[number] = made
        return made

    def describe_rank(self, number: int) -> RankInfo:
        """Returns the info of a rank.

        Local numbers count the ranks of its node, and each rank sees only its own card.
        """
        node = self.nodes[number]
        before = sum(other.id == node.id for other in self.nodes[:number])
        beside = _count(self.nodes)[node.id]
        host = "" if node.here else node.address
        stages = self._config.pipeline_parallel_size
        encodes = number < self._world // stages
        return RankInfo(
            number, self._world, self.rendezvous, before, beside, host, self._masked, encodes=encodes, stages=stages
        )

    def launch(self, number: int) -> RemoteRankState:
        """Starts an actor, which starts the rank's process, which connects to this engine."""
        rank_info, (address, port) = self.describe_rank(number), self._listener.address
        threads = self._config.threads or (computing_cpus() if self.nodes[number].here else None)
        info = rank_messages.ConnectInfo(
            address=address, port=port, rank=number, local=rank_info.local_rank, local_world=rank_info.local_world,
            key=self._key.export_bytes(), tls=tls_files(self._config), patience=60.0, threads=threads,
        )  # fmt: skip
        actor = self._actor(number)
        actor.start.remote(rank_messages.encode(info))
        linked = cast("Future[Link]", self._listener.links[number])
        return RemoteRankState(rank_info, RayRankHandle(linked, self._ray, actor), linked, remote=True)

    def close(self) -> None:
        """Closes the listener, ends the actors and removes the placement group."""
        self._listener.close()
        while self.actors:  # called by a failing thread and by close() at the same time
            with suppress(Exception):
                self._ray.kill(self.actors.popitem()[1])
        ray_cluster.remove_group(self._group)


class RayRankHandle(RemoteRank):
    """Handle of a rank that an actor has started."""

    def __init__(self, linked: Future[Link], ray: ModuleType, actor: Any) -> None:
        super().__init__(linked)
        self._ray, self._actor = ray, actor

    def kill(self) -> None:
        """Closes the link and ends the actor together with its rank process."""
        super().kill()
        with suppress(Exception):
            self._ray.kill(self._actor)


def _count(nodes: Sequence[ClusterNode]) -> Counter[str]:
    return Counter(node.id for node in nodes)


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
