"""The server's handle of an engine in a Ray actor: a process that can be killed, and a socket."""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.nodes_launcher import tls_files
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.handshake import AuthListener
from trencadis.core.links.link import LinkClosed, shut_socket
from trencadis.core.links.socket_relay import Relay
from trencadis.core.process import engine_messages

log = logging.getLogger("trencadis.server")

CONNECT_TIMEOUT = 60.0
"""Seconds within which an engine must connect after its actor has started it."""

EXIT_TIMEOUT = 5.0
"""Default seconds for which ``wait`` blocks."""

KILLED = -9


class EngineStarter(Protocol):
    """Starts and ends engines on the cluster.

    Attributes:
        host: this node's address, to which engines connect.
    """

    host: str

    def begin_engine(self, number: int, connect_info: bytes, start: bytes) -> tuple[int, Future[str]]:
        """Starts an engine; may take seconds. Returns a token, and a future of the error, which is empty on success.

        Raises:
            StartupError: there are not enough free resources.
        """
        ...

    def end_engine(self, token: int) -> None:
        """Ends an engine."""
        ...


class RayEngineProcess:
    """Process handle (``EngineProcessHandle``) of an engine in a Ray actor. Blocking calls run on a separate thread.

    Args:
        sock: the engine's end of the server's socket.
    """

    pid = 0

    def __init__(self, placement: EngineStarter, number: int, config: EngineConfig, sock: socket.socket) -> None:
        self.returncode: int | None = None
        self._starter, self._number, self._sock = placement, number, sock
        self._key = GroupKey.generate()
        context = tls_files(config).context(server=True)
        self._listener = AuthListener((placement.host, 0), self._key, [0], context)
        self._token: int | None = None
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._relay: Relay | None = None
        threading.Thread(target=self._run, args=(config,), name="placed", daemon=True).start()

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self.returncode

    def kill(self) -> None:
        """Ends the actor, and with it the engine."""
        self._end_with_code(KILLED)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; 1 if it is not known."""
        self._gone.wait(EXIT_TIMEOUT if timeout is None else timeout)
        return 1 if self.returncode is None else self.returncode

    def _run(self, config: EngineConfig) -> None:
        """Starts the actor, waits until its engine connects, and relays its bytes."""
        address, port = self._listener.address
        connect_info = rank_messages.ConnectInfo(
            address=address, port=port, rank=0, local=0, local_world=1, key=self._key.export_bytes(),
            tls=tls_files(config),
            patience=CONNECT_TIMEOUT,
        )  # fmt: skip
        start = engine_messages.frame(engine_messages.Start(config.without_secrets()))[engine_messages.HEADER.size :]
        try:
            token, outcome = self._starter.begin_engine(self._number, rank_messages.encode(connect_info), start)
            if not self._register_token(token):
                return
            failure = outcome.result()
            link = None if failure else self._listener.links[0].result(CONNECT_TIMEOUT)
        except StartupError as error:
            failure, link = str(error), None
        except (LinkClosed, TimeoutError):
            failure, link = f"engine {self._number} on Ray has not come to {address}:{port}: nodes must reach it", None
        if link is None:
            self._report_failure(failure)
            return
        with self._lock:
            if self.returncode is None:
                self._relay = Relay(self._sock, link, self._on_relay_closed)
                return
        link.close()

    def _register_token(self, token: int) -> bool:
        """Stores the actor's token; if the engine was killed meanwhile, ends the actor and returns False."""
        with self._lock:
            self._token = token
            if self.returncode is None:
                return True
        self._starter.end_engine(token)
        return False

    def _report_failure(self, why: str) -> None:
        """Reports a failed start to the server with the frame that an engine process would send."""
        if self.returncode is None:
            with suppress(OSError):
                self._sock.sendall(engine_messages.frame(engine_messages.Fatal(why, 2)))
        self._end_with_code(2)

    def _on_relay_closed(self, why: str) -> None:
        if self.returncode is None and why:
            log.error("engine %d on Ray is gone: %s", self._number, why)
        self._end_with_code(1)

    def _end_with_code(self, code: int) -> None:
        with self._lock:
            if self.returncode is not None:
                return
            self.returncode, token = code, self._token
        self._listener.close()
        if token is not None:
            self._starter.end_engine(token)
        if self._relay is None:
            shut_socket(self._sock)
        else:
            self._relay.close()
        self._gone.set()
