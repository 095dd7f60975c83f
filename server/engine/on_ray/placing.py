"""Engines on a Ray cluster as the server sees them: a process that can be killed, and a socket."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.devices import RESOURCES, likely
from trencadis.core.executor import frames
from trencadis.core.executor.facts import facts_of
from trencadis.core.executor.nodes import files
from trencadis.core.executor.on_ray import cluster
from trencadis.core.links.door import Door
from trencadis.core.links.link import shut
from trencadis.core.links.relay import Relay
from trencadis.core.links.secret import GroupKey
from trencadis.core.process import wire
from trencadis.server.engine.on_ray.actor import EngineActor
from trencadis.server.engine.spawn import EngineHandle

log = logging.getLogger("trencadis.server")

COME = 60.0
"""Seconds in which an engine whose actor has started it must have come."""

PATIENCE = 5.0
"""Seconds in which whoever waits for an engine's end is kept waiting."""

KILLED = -9


class Placement:
    """A placement group with a bundle of cards for each engine, which is on one node with all its ranks.

    This process needs no cards. Ray ends actors and group where it ends.

    Args:
        config: of every engine.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    def __init__(self, config: EngineConfig, engines: int, environ: Mapping[str, str]) -> None:
        self._resource = RESOURCES.get(likely(config.device), likely(config.device).upper())
        self._ranks = config.ranks
        self.ray = cluster.connect(environ)
        nodes = cluster.settled(self.ray, self._resource, engines * self._ranks)
        self.nodes = cluster.share(nodes, engines, self._ranks, self._resource)
        self.host = next(n.address for n in cluster.nodes_of(self.ray, self._resource) if n.here)
        self.crowd = max(Counter(node.id for node in self.nodes).values())
        """Engines on the fullest node."""
        self._group = cluster.bundles(self.ray, engines, self._ranks, self._resource)
        self.facts = dataclasses.astuple(facts_of(config.model))

    def engine(self, number: int, config: EngineConfig) -> EngineHandle:
        """Starts engine ``number``; it comes while the server goes on."""
        ours, theirs = socket.socketpair()
        return EngineHandle(PlacedEngine(self, number, config, theirs), ours, partial(self.engine, number))

    def actor(self, number: int) -> Any:
        """A new actor in an engine's bundle."""
        return cluster.taking(self.ray, EngineActor, self._group, number, self._resource, self._ranks)

    def close(self) -> None:
        """Gives everything back to Ray."""
        cluster.release(self._group)


class PlacedEngine:
    """``EngineEnd`` of an engine in an actor. Whatever can wait does so on a thread of its own.

    Args:
        sock: the engine's end of the server's socket.
    """

    pid = 0

    def __init__(self, placement: Placement, number: int, config: EngineConfig, sock: socket.socket) -> None:
        self.returncode: int | None = None
        self._placement, self._number, self._sock = placement, number, sock
        self._key = GroupKey.fresh()
        context = files(config).context(server=True)
        self._door = Door((placement.host, 0), self._key, [0], context)
        self._actor: Any = placement.actor(number)
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._relay: Relay | None = None
        threading.Thread(target=self._run, args=(config,), name="placed", daemon=True).start()

    def poll(self) -> int | None:
        """None while it runs."""
        return self.returncode

    def kill(self) -> None:
        """Ends the actor, and with it the engine."""
        self._over(KILLED)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; 1 where nothing more is known."""
        self._gone.wait(PATIENCE if timeout is None else timeout)
        return 1 if self.returncode is None else self.returncode

    def _run(self, config: EngineConfig) -> None:
        """Waits for Ray, which has no bundle where its node was lost, and then for the engine."""
        address, port = self._door.address
        dial = frames.Dial(
            address=address, port=port, rank=0, local=0, beside=1, key=self._key.hand_over(), tls=files(config),
            patience=COME,
        )  # fmt: skip
        start = wire.frame(wire.Start(config.without_secrets()))[wire.HEADER.size :]
        try:
            called = self._actor.start.remote(frames.encode(dial), start, self._placement.facts)
            said = self._placement.ray.get(called)
            link = None if said else self._door.links[0].result(COME)
        except Exception as error:  # Ray's are many; each means that this engine does not come
            said, link = f"Ray did not start engine {self._number}: {_last_line(error)}", None
        if link is None:
            self._tell(said)
            return
        with self._lock:
            if self.returncode is None:
                self._relay = Relay(self._sock, link, self._ended)
                return
        link.close()

    def _tell(self, why: str) -> None:
        """Says why there is no engine, as its process would."""
        if self.returncode is None:
            with suppress(OSError):
                self._sock.sendall(wire.frame(wire.Fatal(why, 2)))
        self._over(2)

    def _ended(self, why: str) -> None:
        if self.returncode is None and why:
            log.error("engine %d on Ray is gone: %s", self._number, why)
        self._over(1)

    def _over(self, code: int) -> None:
        with self._lock:
            if self.returncode is not None:
                return
            self.returncode = code
        self._door.close()
        with suppress(Exception):
            self._placement.ray.kill(self._actor)
        if self._relay is None:
            shut(self._sock)
        else:
            self._relay.close()
        self._gone.set()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__
