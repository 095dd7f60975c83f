"""Engines of a server on a Ray cluster, started by a separate process (``ray_broker_process``). Does not import Ray.

An engine's handle is a process that can be killed, and a socket.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Protocol

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages, ray_broker_process
from trencadis.core.executor.engine_process_launcher import RAY_TOKEN, EngineHandle, EngineProcessHandle
from trencadis.core.executor.multi_node_launcher import tls_files
from trencadis.core.executor.rank_info_and_fingerprint import compute_rank_fingerprint
from trencadis.core.links.authenticated_link import Relay
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.message_link import LinkClosed, PlainLink, shut_socket
from trencadis.core.links.rank_listener import AuthListener
from trencadis.core.process import engine_messages
from trencadis.core.process.child_process_environment_and_exit import environment, spawn_child

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


LOST = "the Ray cluster that had reserved resources for engines is gone: `ray status` says whether one runs"


def start_broker_process() -> tuple[EngineProcessHandle, socket.socket]:
    """Starts the broker process; returns it and our end of its socket."""
    made = environment(os.environ, 1, False)
    if RAY_TOKEN in os.environ:
        made[RAY_TOKEN] = os.environ[RAY_TOKEN]
    return spawn_child(ray_broker_process.__name__, made)


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
        self._reservation = ray_broker_process.ReserveEngines(config.without_secrets(), engines, multi_node)
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
            asked = ray_broker_process.StartEngine(token, number, connect_info, start, self.fingerprint)
            self._send(asked)
        return token, waits

    def end_engine(self, token: int) -> None:
        """Ends an engine, if it exists."""
        self._pending.pop(token, None)
        self._send(ray_broker_process.StopEngine(token))

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
            link.send(ray_broker_process.encode(self._reservation))
            found = ray_broker_process.decode_up(link.receive())
        except LinkClosed:
            self._process.wait()
            raise StartupError(LOST) from None
        if not isinstance(found, ray_broker_process.EnginesReserved):
            link.close()
            self._process.wait()
            raise StartupError(found.message if isinstance(found, ray_broker_process.ReservationFailed) else LOST)
        self.host, self.on_this_node, self.max_per_node = found.host, found.on_this_node, found.max_per_node
        self._lost = False
        threading.Thread(target=self._listen, args=(link,), name="broker", daemon=True).start()

    def _listen(self, link: PlainLink) -> None:
        with suppress(LinkClosed):
            while True:
                found = ray_broker_process.decode_up(link.receive())
                if isinstance(found, ray_broker_process.EngineStarted):
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

    def _send(self, message: ray_broker_process.StartEngine | ray_broker_process.StopEngine) -> None:
        try:
            self._link.send(ray_broker_process.encode(message))
        except LinkClosed:
            if isinstance(message, ray_broker_process.StartEngine):
                self._resolve(message.token, LOST)
