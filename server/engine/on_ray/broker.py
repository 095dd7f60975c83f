"""Asks Ray for engines, as a process beside the server's: Ray ends the process of a driver whose head is gone.

``python -P -m trencadis.server.engine.on_ray.broker FD`` with one end of a socket pair. No Step and no token pass here.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

import msgspec

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.links.link import LinkClosed, PlainLink
from trencadis.core.process.children import run
from trencadis.server.engine.on_ray.placing import Lead, Placement

ANOTHER = "WrongClusterID"
"""What Ray says where the head has come again without its memory."""


class Enter(msgspec.Struct, tag=True):
    """Down, first: what engines need; ``lead``: it is one whose ranks may be on several nodes."""

    config: EngineConfig
    engines: int
    lead: bool


class Take(msgspec.Struct, tag=True):
    """Down: start an engine; ``Taken`` answers with the same token. The fields are those of ``EngineActor.start``."""

    token: int
    number: int
    dial: bytes
    start: bytes
    facts: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Take({self.token}, engine {self.number})"  # a report of a crash may show it: no key


class Drop(msgspec.Struct, tag=True):
    """Down: end the engine of a token."""

    token: int


class Entered(msgspec.Struct, tag=True):
    """Up: the cluster has room.

    Args:
        host: this node's address, at which engines reach the server.
        here: whether a leading engine is best on this node.
        crowd: engines on the fullest node.
    """

    host: str
    here: bool
    crowd: int


class Barred(msgspec.Struct, tag=True):
    """Up: there is no cluster, or no room; the process ends."""

    message: str


class Taken(msgspec.Struct, tag=True):
    """Up: an engine is on its way to the server; ``said``: why it is not."""

    token: int
    said: str


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_down = msgspec.msgpack.Decoder(Enter | Take | Drop).decode
decode_up = msgspec.msgpack.Decoder(Entered | Barred | Taken).decode


def work(sock: socket.socket) -> int:
    """Serves one server until it closes its end; the exit code."""
    link = PlainLink(sock)
    with suppress(LinkClosed):
        asked = decode_down(link.receive())
        assert isinstance(asked, Enter)
        try:
            places = (Lead if asked.lead else Placement)(asked.config, asked.engines, os.environ)
        except StartupError as error:
            link.send(encode(Barred(str(error))))
            link.receive()  # until it is read
            return 2
        link.send(encode(Entered(places.host, places.here, places.crowd)))
        Brokerage(places, link).serve()
    return 0


class Brokerage:
    """The actors of one server's engines; Ray ends them where this process ends."""

    def __init__(self, places: Placement | Lead, link: PlainLink) -> None:
        self._places, self._link = places, link
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        """By token; None: not there yet."""

    def serve(self) -> None:
        """Reads what the server wants, until LinkClosed."""
        while True:
            match decode_down(self._link.receive()):
                case Take() as asked:
                    self._actors[asked.token] = None
                    threading.Thread(target=self._take, args=(asked,), daemon=True).start()
                case Drop(token):
                    self._kill(self._dropped(token))

    def _take(self, asked: Take) -> None:
        try:
            actor, environ = self._places.actor(asked.number)
            if not self._keep(asked.token, actor):
                return
            called = actor.start.remote(asked.dial, asked.start, asked.facts, environ)
            said = str(self._places.ray.get(called))
        except StartupError as error:
            said = str(error)
        except Exception as error:  # Ray's are many; each means that this engine does not come
            said = f"Ray did not start engine {asked.number}: {_last_line(error)}"
            if ANOTHER in str(error):
                self._link.close()  # this process can ask the old cluster alone; its successor asks the new one
                return
        with suppress(LinkClosed):
            self._link.send(encode(Taken(asked.token, said)))

    def _keep(self, token: int, actor: Any) -> bool:
        """False: it was dropped before it was there, and is ended."""
        with self._lock:
            wanted = token in self._actors
            if wanted:
                self._actors[token] = actor
        if not wanted:
            self._kill(actor)
        return wanted

    def _dropped(self, token: int) -> Any:
        with self._lock:
            return self._actors.pop(token, None)

    def _kill(self, actor: Any) -> None:
        if actor is not None:
            with suppress(Exception):
                self._places.ray.kill(actor)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


if __name__ == "__main__":
    run(work)
