"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

from trencadis.core.config import EngineConfig
from trencadis.core.cpus import computing_cpus
from trencadis.core.devices import RESOURCES, likely
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.launcher import Child
from trencadis.core.executor.nodes import Afar, files
from trencadis.core.executor.on_ray import cluster
from trencadis.core.executor.on_ray.actor import RankActor
from trencadis.core.executor.on_ray.cluster import ClusterNode
from trencadis.core.executor.ranks import Place
from trencadis.core.links.door import Door
from trencadis.core.links.link import Link
from trencadis.core.links.secret import GroupKey
from trencadis.core.links.topology import Topology


class RayLauncher:
    """A placement group with an actor for each rank; that of rank 0 holds the card of this process.

    Args:
        rendezvous: where the ranks meet.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    def __init__(self, config: EngineConfig, lie: Topology, environ: Mapping[str, str]) -> None:
        device = likely(config.device)
        self._config, self._world = config, lie.world
        self._resource = RESOURCES.get(device, device.upper())
        self._masked = device != "cpu"
        self._ray = cluster.connect(environ)
        size = config.tensor_parallel_size
        found = cluster.settled(self._ray, self._resource, lie.world)
        self.nodes = cluster.deal(found, lie.world // size, size, self._resource, config.allow_tp_over_nodes)
        self._group = cluster.reserve(self._ray, self.nodes, self._resource)
        self._key = GroupKey.fresh()
        self.rendezvous = ""
        self.actors: dict[int, Any] = {}
        try:
            context = files(config).context(server=True)
            self._door = Door((self.nodes[0].address, 0), self._key, range(1, lie.world), context)
            self._hold()
        except BaseException:
            cluster.release(self._group)
            raise
        self.where = f"{self._door.address[0]}:{self._door.address[1]}"

    @property
    def host(self) -> str:
        """This node's address."""
        return self.nodes[0].address

    def _hold(self) -> None:
        """Takes the card that Ray gives to rank 0. Nothing has opened a device in this process so far."""
        holder = self._actor(0)
        try:
            shown = self._ray.get(holder.cards.remote(), timeout=60)
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1][:300]
            raise StartupError(f"an actor of Ray cannot run Trencadis: {why}; install it on every node") from None
        if self._masked:
            os.environ.update(shown)

    def _actor(self, number: int) -> Any:
        made = cluster.taking(self._ray, RankActor, self._group, number, self._resource, 1)
        self.actors[number] = made
        return made

    def place(self, number: int) -> Place:
        """Ranks of a node count among themselves; each sees its own card alone."""
        node = self.nodes[number]
        before = sum(other.id == node.id for other in self.nodes[:number])
        beside = _count(self.nodes)[node.id]
        host = "" if node.here else node.address
        stages = self._config.pipeline_parallel_size
        encodes = number < self._world // stages
        return Place(
            number, self._world, self.rendezvous, before, beside, host, self._masked, encodes=encodes, stages=stages
        )

    def launch(self, number: int) -> Child:
        """Starts an actor, which starts the rank's process; that comes to this engine."""
        place, (address, port) = self.place(number), self._door.address
        threads = self._config.threads or (computing_cpus() if self.nodes[number].here else None)
        told = frames.Dial(
            address=address, port=port, rank=number, local=place.local_rank, beside=place.local_world,
            key=self._key.hand_over(), tls=files(self._config), patience=60.0, threads=threads,
        )  # fmt: skip
        actor = self._actor(number)
        actor.start.remote(frames.encode(told))
        linked = cast("Future[Link]", self._door.links[number])
        return Child(place, ActorEnd(linked, self._ray, actor), linked, remote=True)

    def close(self) -> None:
        """Gives everything back to Ray."""
        self._door.close()
        while self.actors:  # a failure and the engine's end may both be here
            with suppress(Exception):
                self._ray.kill(self.actors.popitem()[1])
        cluster.release(self._group)


class ActorEnd(Afar):
    """The end of a rank that an actor has started."""

    def __init__(self, linked: Future[Link], ray: Any, actor: Any) -> None:
        super().__init__(linked)
        self._ray, self._actor = ray, actor

    def kill(self) -> None:
        """Closes the link and ends the actor, and with it the process."""
        super().kill()
        with suppress(Exception):
            self._ray.kill(self._actor)


def _count(nodes: Sequence[ClusterNode]) -> Counter[str]:
    return Counter(node.id for node in nodes)
