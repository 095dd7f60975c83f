"""An engine in an actor as the server sees it: a process that can be killed, and a socket."""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.nodes import files
from trencadis.core.links.door import Door
from trencadis.core.links.link import LinkClosed, shut
from trencadis.core.links.relay import Relay
from trencadis.core.links.secret import GroupKey
from trencadis.core.process import wire

log = logging.getLogger("trencadis.server")

COME = 60.0
"""Seconds in which an engine whose actor has started it must have come."""

PATIENCE = 5.0
"""Seconds in which whoever waits for an engine's end is kept waiting."""

KILLED = -9


class Places(Protocol):
    """Where engines are put.

    Attributes:
        host: this node's address, at which engines reach the server.
    """

    host: str

    def begin(self, number: int, dial: bytes, start: bytes) -> tuple[int, Future[str]]:
        """Starts an engine; may take seconds. Returns a token, and why it does not come, or an empty text if it does.

        Raises:
            StartupError: there is no room.
        """
        ...

    def finish(self, token: int) -> None:
        """Ends an engine."""
        ...


class PlacedEngine:
    """``EngineEnd`` of an engine in an actor. Whatever can wait does so on a thread of its own.

    Args:
        sock: the engine's end of the server's socket.
    """

    pid = 0

    def __init__(self, placement: Places, number: int, config: EngineConfig, sock: socket.socket) -> None:
        self.returncode: int | None = None
        self._placement, self._number, self._sock = placement, number, sock
        self._key = GroupKey.fresh()
        context = files(config).context(server=True)
        self._door = Door((placement.host, 0), self._key, [0], context)
        self._token: int | None = None
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
            token, told = self._placement.begin(self._number, frames.encode(dial), start)
            if not self._keeps(token):
                return
            said = told.result()
            link = None if said else self._door.links[0].result(COME)
        except StartupError as error:
            said, link = str(error), None
        except (LinkClosed, TimeoutError):
            said, link = f"engine {self._number} on Ray has not come to {address}:{port}: nodes must reach it", None
        if link is None:
            self._tell(said)
            return
        with self._lock:
            if self.returncode is None:
                self._relay = Relay(self._sock, link, self._ended)
                return
        link.close()

    def _keeps(self, token: int) -> bool:
        """False: the engine is over before it has begun, and is ended."""
        with self._lock:
            self._token = token
            if self.returncode is None:
                return True
        self._placement.finish(token)
        return False

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
            self.returncode, token = code, self._token
        self._door.close()
        if token is not None:
            self._placement.finish(token)
        if self._relay is None:
            shut(self._sock)
        else:
            self._relay.close()
        self._gone.set()
