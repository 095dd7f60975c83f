"""Launches ranks as actors of a Ray cluster.

The actor of a rank reserves its card and runs its process; it takes no part in Steps.
"""

from __future__ import annotations

import os
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
from trencadis.core.executor import rank_messages, ray_access_and_node_placement
from trencadis.core.executor.headless_ranks import HeadlessRanks
from trencadis.core.executor.multi_node_launcher import RemoteRank, tls_files
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.executor.rank_launcher import RemoteRankState
from trencadis.core.executor.ray_access_and_node_placement import ClusterNode
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.message_link import Link
from trencadis.core.links.rank_listener import AuthListener
from trencadis.core.links.rank_placement import Topology


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
        self._ray = ray_access_and_node_placement.connect(environ)
        size = config.tensor_parallel_size
        found = ray_access_and_node_placement.await_free_nodes(self._ray, self._resource, topology.world)
        self.nodes = ray_access_and_node_placement.assign_nodes(
            found, topology.world // size, size, self._resource, config.allow_tp_over_nodes
        )
        self._group = ray_access_and_node_placement.create_rank_group(self._ray, self.nodes, self._resource)
        self._key = GroupKey.generate()
        self.rendezvous = ""
        self.actors: dict[int, Any] = {}
        try:
            context = tls_files(config).context(server=True)
            self._listener = AuthListener((self.nodes[0].address, 0), self._key, range(1, topology.world), context)
            self._reserve_own_card()
        except BaseException:
            ray_access_and_node_placement.remove_group(self._group)
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
        made = ray_access_and_node_placement.create_actor_in_bundle(
            self._ray, RankActor, self._group, number, self._resource, 1
        )
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
        ray_access_and_node_placement.remove_group(self._group)


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
