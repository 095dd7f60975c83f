"""Engines of this server on a Ray cluster, for which a process beside this one asks (``broker``). Imports no Ray."""

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
from trencadis.core.executor.facts import facts_of
from trencadis.core.links.link import LinkClosed, PlainLink
from trencadis.core.process.children import environment
from trencadis.server.engine.on_ray import broker
from trencadis.server.engine.on_ray.placed import PlacedEngine
from trencadis.server.engine.spawn import RAY_TOKEN, EngineEnd, EngineHandle

log = logging.getLogger("trencadis.server")

LOST = "the Ray cluster that had a place for engines is gone: `ray status` says whether one runs"


def spawn_broker() -> tuple[EngineEnd, socket.socket]:
    """Starts the process; returns it and our end of its socket."""
    made = environment(os.environ, 1, False)
    if RAY_TOKEN in os.environ:
        made[RAY_TOKEN] = os.environ[RAY_TOKEN]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", broker.__name__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=made,
        )
    return process, ours


class ClusterEngines:
    """Starts and ends engines on the cluster. A broker that has ended is replaced when the next engine is to start.

    Args:
        config: of every engine.
        lead: whether it is one whose ranks may be on several nodes; else each is on one.

    Attributes:
        host: this node's address, at which engines reach the server.
        here: whether a leading engine is best on this node.
        crowd: engines on the fullest node.

    Raises:
        StartupError: there is no cluster, or not as many cards.
    """

    def __init__(self, config: EngineConfig, engines: int, lead: bool = False) -> None:
        self._asked = broker.Enter(config.without_secrets(), engines, lead)
        self.facts = dataclasses.astuple(facts_of(config.model))
        self._lock = threading.Lock()
        self._tokens = count()
        self._waiting: dict[int, Future[str]] = {}
        self._lost = self._closed = False
        self._open()

    def engine(self, number: int, config: EngineConfig) -> EngineHandle:
        """Starts engine ``number``, and any successor; it comes while the server goes on."""
        ours, theirs = socket.socketpair()
        return EngineHandle(PlacedEngine(self, number, config, theirs), ours, partial(self.engine, number))

    def begin(self, number: int, dial: bytes, start: bytes) -> tuple[int, Future[str]]:
        """Starts an engine in an actor; may take seconds.

        Returns:
            A token to end it with, and why it does not come, or an empty text once it is on its way.

        Raises:
            StartupError: there is no cluster any more, or no room.
        """
        with self._lock:
            if self._lost and not self._closed:
                self._process.wait()
                self._open()
            token = next(self._tokens)
            waits = self._waiting[token] = Future[str]()
            asked = broker.Take(token, number, dial, start, self.facts)
            self._send(asked)
        return token, waits

    def finish(self, token: int) -> None:
        """Ends an engine, if it is there."""
        self._waiting.pop(token, None)
        self._send(broker.Drop(token))

    def close(self) -> None:
        """Gives everything back to Ray."""
        self._closed = True
        self._link.close()
        self._process.wait()

    def _open(self) -> None:
        """A broker that has found room.

        Raises:
            StartupError: it has not.
        """
        self._process, sock = spawn_broker()
        self._link = link = PlainLink(sock)
        try:
            link.send(broker.encode(self._asked))
            found = broker.decode_up(link.receive())
        except LinkClosed:
            self._process.wait()
            raise StartupError(LOST) from None
        if not isinstance(found, broker.Entered):
            link.close()
            self._process.wait()
            raise StartupError(found.message if isinstance(found, broker.Barred) else LOST)
        self.host, self.here, self.crowd = found.host, found.here, found.crowd
        self._lost = False
        threading.Thread(target=self._listen, args=(link,), name="broker", daemon=True).start()

    def _listen(self, link: PlainLink) -> None:
        with suppress(LinkClosed):
            while True:
                found = broker.decode_up(link.receive())
                if isinstance(found, broker.Taken):
                    self._answer(found.token, found.said)
        if not self._closed:
            log.error("%s; the engines there will end, and be asked for again", LOST)
        with self._lock:
            self._lost, waiting = True, list(self._waiting)
        link.close()
        for token in waiting:
            self._answer(token, LOST)

    def _answer(self, token: int, said: str) -> None:
        waits = self._waiting.pop(token, None)
        if waits is not None:
            with suppress(InvalidStateError):
                waits.set_result(said)

    def _send(self, message: broker.Take | broker.Drop) -> None:
        try:
            self._link.send(broker.encode(message))
        except LinkClosed:
            if isinstance(message, broker.Take):
                self._answer(message.token, LOST)
