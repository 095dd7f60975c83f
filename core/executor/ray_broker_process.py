"""Child process that talks to Ray for the server: Ray may kill it with the cluster without ending the server.

``python -P -m trencadis.core.executor.ray_broker_process FD`` with one end of a socket pair. No steps and no tokens
pass through it.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

import msgspec

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.ray_engine_actors import EnginePlacement, MultiNodePlacement
from trencadis.core.links.message_link import LinkClosed, PlainLink
from trencadis.core.process.child_process_environment_and_exit import run

WRONG_CLUSTER = "WrongClusterID"
"""Part of Ray's error message after the head node was restarted without its state."""


class ReserveEngines(msgspec.Struct, tag=True):
    """Down, first: reserve resources for engines; ``multi_node``: one engine whose ranks may be on several nodes."""

    config: EngineConfig
    engines: int
    multi_node: bool


class StartEngine(msgspec.Struct, tag=True):
    """Down: start an engine; ``EngineStarted`` answers with the same token. The fields are those of
    ``EngineActor.start``.
    """

    token: int
    number: int
    connect_info: bytes
    start: bytes
    fingerprint: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Take({self.token}, engine {self.number})"  # no key, since a crash report may show this text


class StopEngine(msgspec.Struct, tag=True):
    """Down: end the engine of a token."""

    token: int


class EnginesReserved(msgspec.Struct, tag=True):
    """Up: the cluster has enough free resources.

    Args:
        host: this node's address, to which engines connect.
        on_this_node: True if a multi-node engine is best on this node.
        max_per_node: number of engines on the node with most of them.
    """

    host: str
    on_this_node: bool
    max_per_node: int


class ReservationFailed(msgspec.Struct, tag=True):
    """Up: the reservation failed (no cluster, or not enough resources); the broker exits."""

    message: str


class EngineStarted(msgspec.Struct, tag=True):
    """Up: an engine is starting; ``error``: why it is not."""

    token: int
    error: str


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_down = msgspec.msgpack.Decoder(ReserveEngines | StartEngine | StopEngine).decode
decode_up = msgspec.msgpack.Decoder(EnginesReserved | ReservationFailed | EngineStarted).decode


def serve_broker(sock: socket.socket) -> int:
    """Serves one server until it closes its end; returns the exit code."""
    link = PlainLink(sock)
    with suppress(LinkClosed):
        asked = decode_down(link.receive())
        assert isinstance(asked, ReserveEngines)
        try:
            placement = (MultiNodePlacement if asked.multi_node else EnginePlacement)(
                asked.config, asked.engines, os.environ
            )
        except StartupError as error:
            link.send(encode(ReservationFailed(str(error))))
            link.receive()  # waits until the message has been read
            return 2
        link.send(encode(EnginesReserved(placement.host, placement.on_this_node, placement.max_per_node)))
        RayBroker(placement, link).serve()
    return 0


class RayBroker:
    """The actors of one server's engines; Ray ends them when this process ends."""

    def __init__(self, placement: EnginePlacement | MultiNodePlacement, link: PlainLink) -> None:
        self._placement, self._link = placement, link
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        """Actors by token; None: not created yet."""

    def serve(self) -> None:
        """Handles the server's messages, until LinkClosed."""
        while True:
            match decode_down(self._link.receive()):
                case StartEngine() as asked:
                    self._actors[asked.token] = None
                    threading.Thread(target=self._start_engine, args=(asked,), daemon=True).start()
                case StopEngine(token):
                    self._kill(self._pop_actor(token))

    def _start_engine(self, asked: StartEngine) -> None:
        try:
            actor, environ = self._placement.create_actor(asked.number)
            if not self._register_actor(asked.token, actor):
                return
            called = actor.start.remote(asked.connect_info, asked.start, asked.fingerprint, environ)
            error_text = str(self._placement.ray.get(called))
        except StartupError as error:
            error_text = str(error)
        except Exception as error:  # Ray raises many types; each means that this engine does not start
            error_text = f"Ray did not start engine {asked.number}: {_get_last_line(error)}"
            if WRONG_CLUSTER in str(error):
                self._link.close()  # this process can only reach the old cluster; its successor reaches the new one
                return
        with suppress(LinkClosed):
            self._link.send(encode(EngineStarted(asked.token, error_text)))

    def _register_actor(self, token: int, actor: Any) -> bool:
        """Stores the actor of a token; if the engine was stopped meanwhile, kills it and returns False."""
        with self._lock:
            wanted = token in self._actors
            if wanted:
                self._actors[token] = actor
        if not wanted:
            self._kill(actor)
        return wanted

    def _pop_actor(self, token: int) -> Any:
        with self._lock:
            return self._actors.pop(token, None)

    def _kill(self, actor: Any) -> None:
        if actor is not None:
            with suppress(Exception):
                self._placement.ray.kill(actor)


def _get_last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


if __name__ == "__main__":
    run(serve_broker)
