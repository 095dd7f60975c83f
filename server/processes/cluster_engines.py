"""Engines of this server on a Ray cluster, started by a separate process (``ray_broker``). Does not import Ray."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info import compute_rank_fingerprint
from trencadis.core.links.link import LinkClosed, PlainLink
from trencadis.core.process.child_process import environment
from trencadis.server.engine.spawn import RAY_TOKEN, EngineHandle, EngineProcessHandle
from trencadis.server.processes import ray_broker
from trencadis.server.processes.ray_engine import RayEngineProcess

log = logging.getLogger("trencadis.server")

LOST = "the Ray cluster that had reserved resources for engines is gone: `ray status` says whether one runs"


def start_broker_process() -> tuple[EngineProcessHandle, socket.socket]:
    """Starts the broker process; returns it and our end of its socket."""
    made = environment(os.environ, 1, False)
    if RAY_TOKEN in os.environ:
        made[RAY_TOKEN] = os.environ[RAY_TOKEN]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", ray_broker.__name__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=made,
        )
    return process, ours


class RayEngines:
    """Starts and ends engines on the cluster. A broker that has ended is replaced when the next engine starts.

    Args:
        config: configuration of every engine.
        multi_node: True for one engine whose ranks may be on several nodes; else each engine is on one node.

    Attributes:
        host: this node's address, to which engines connect.
        on_this_node: True if a multi-node engine is best on this node.
        max_per_node: number of engines on the node with most of them.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    def __init__(self, config: EngineConfig, engines: int, multi_node: bool = False) -> None:
        self._reservation = ray_broker.ReserveEngines(config.without_secrets(), engines, multi_node)
        self.fingerprint = dataclasses.astuple(compute_rank_fingerprint(config.model))
        self._lock = threading.Lock()
        self._tokens = count()
        self._pending: dict[int, Future[str]] = {}
        self._lost = self._closed = False
        self._start_broker()

    def start_engine(self, number: int, config: EngineConfig) -> EngineHandle:
        """Starts engine ``number``, and any successor; returns before it has connected."""
        ours, theirs = socket.socketpair()
        return EngineHandle(RayEngineProcess(self, number, config, theirs), ours, partial(self.start_engine, number))

    def begin_engine(self, number: int, connect_info: bytes, start: bytes) -> tuple[int, Future[str]]:
        """Starts an engine in an actor; may take seconds.

        Returns:
            A token to end it with, and a future of the error, empty once the engine is starting.

        Raises:
            StartupError: the cluster is gone, or has not enough free resources.
        """
        with self._lock:
            if self._lost and not self._closed:
                self._process.wait()
                self._start_broker()
            token = next(self._tokens)
            waits = self._pending[token] = Future[str]()
            asked = ray_broker.StartEngine(token, number, connect_info, start, self.fingerprint)
            self._send(asked)
        return token, waits

    def end_engine(self, token: int) -> None:
        """Ends an engine, if it exists."""
        self._pending.pop(token, None)
        self._send(ray_broker.StopEngine(token))

    def close(self) -> None:
        """Returns all resources to Ray."""
        self._closed = True
        self._link.close()
        self._process.wait()

    def _start_broker(self) -> None:
        """Starts a broker that has reserved the resources.

        Raises:
            StartupError: the reservation failed.
        """
        self._process, sock = start_broker_process()
        self._link = link = PlainLink(sock)
        try:
            link.send(ray_broker.encode(self._reservation))
            found = ray_broker.decode_up(link.receive())
        except LinkClosed:
            self._process.wait()
            raise StartupError(LOST) from None
        if not isinstance(found, ray_broker.EnginesReserved):
            link.close()
            self._process.wait()
            raise StartupError(found.message if isinstance(found, ray_broker.ReservationFailed) else LOST)
        self.host, self.on_this_node, self.max_per_node = found.host, found.on_this_node, found.max_per_node
        self._lost = False
        threading.Thread(target=self._listen, args=(link,), name="broker", daemon=True).start()

    def _listen(self, link: PlainLink) -> None:
        with suppress(LinkClosed):
            while True:
                found = ray_broker.decode_up(link.receive())
                if isinstance(found, ray_broker.EngineStarted):
                    self._resolve(found.token, found.error)
        if not self._closed:
            log.error("%s; the engines there will end, and be asked for again", LOST)
        with self._lock:
            self._lost, waiting = True, list(self._pending)
        link.close()
        for token in waiting:
            self._resolve(token, LOST)

    def _resolve(self, token: int, said: str) -> None:
        waits = self._pending.pop(token, None)
        if waits is not None:
            with suppress(InvalidStateError):
                waits.set_result(said)

    def _send(self, message: ray_broker.StartEngine | ray_broker.StopEngine) -> None:
        try:
            self._link.send(ray_broker.encode(message))
        except LinkClosed:
            if isinstance(message, ray_broker.StartEngine):
                self._resolve(message.token, LOST)
