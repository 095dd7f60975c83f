"""Connects and runs ranks of this machine for an engine on another machine.

These are the machines of ``--headless``, and all torchrun processes but the first.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.multi_node_launcher import listen_address, shared_key, tls_files
from trencadis.core.executor.rank_info_and_fingerprint import requested_threads, threads_of
from trencadis.core.executor.rank_launcher import PATIENCE, spawn_rank
from trencadis.core.links.authenticated_link import KeyedLink
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.handshake import LIMIT, HandshakeFailed, handshake_as_rank
from trencadis.core.links.message_link import LinkClosed, PlainLink
from trencadis.core.links.rank_placement import Topology
from trencadis.core.links.tcp_and_tls_stream import ByteStream, PlainStream, TlsStream

log = logging.getLogger("trencadis.engine")

RETRY_SECONDS = 0.3
"""Seconds between two attempts."""

REFUSALS = 5
"""Refused attempts in a row after which to give up; an engine that restarts refuses some."""


def connect_to_engine(target: rank_messages.ConnectInfo) -> KeyedLink:
    """Connects to the engine; retries until it answers or ``target.patience`` seconds have passed.

    Raises:
        StartupError: the engine does not answer in time, or it belongs to another group.
    """
    end, refused = time.monotonic() + target.patience, 0
    context = target.tls.context(server=False)
    while True:
        try:
            key = GroupKey(target.key) if target.key else GroupKey.read(target.key_file)
            sock = socket.create_connection((target.address, target.port), LIMIT)
            try:
                stream: ByteStream
                stream = PlainStream(sock) if context is None else TlsStream(sock, context, False, LIMIT)
                return handshake_as_rank(stream, key, target.rank)
            except BaseException:
                sock.close()
                raise
        except HandshakeFailed as error:
            refused += 1
            if refused >= REFUSALS:
                raise StartupError(f"rank {target.rank}: {target.address}:{target.port}: {error}") from None
        except (OSError, StartupError) as error:
            if time.monotonic() > end:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise StartupError(
                    f"rank {target.rank}: no engine answers at {target.address}:{target.port} ({why}): --master-addr "
                    f"and "
                    "--master-port name it"
                ) from None
        time.sleep(RETRY_SECONDS)


class HeadlessRanks:
    """Runs this machine's rank processes for a remote engine; they end when this object is closed."""

    def __init__(self, targets: Sequence[rank_messages.ConnectInfo]) -> None:
        self._ended: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._processes: list[tuple[subprocess.Popen[bytes], PlainLink]] = []
        try:
            for target in targets:
                process, sock = spawn_rank(threads_of(target.threads, target.local_world))
                link = PlainLink(sock)
                self._processes.append((process, link))
                link.send(rank_messages.encode(target))
                threading.Thread(target=self._watch, args=(target, process, link), daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _watch(self, target: rank_messages.ConnectInfo, process: subprocess.Popen[bytes], link: PlainLink) -> None:
        said = ""
        with suppress(LinkClosed):
            while True:
                match rank_messages.decode_up(link.receive()):
                    case rank_messages.EngineReached():
                        log.info("rank %d has reached the engine at %s:%d", target.rank, target.address, target.port)
                    case rank_messages.RankFailure(message, _):
                        said = message
        self._ended.put((process.wait(), said))

    def wait(self) -> int:
        """Waits until one of the ranks has ended, then ends the others; returns its exit code.

        Raises:
            StartupError: it reported a failure, e.g. that the engine cannot be reached.
        """
        code, said = self._ended.get()
        self.close()
        if said:
            raise StartupError(said)
        return code

    def close(self) -> None:
        """Ends all rank processes; kills those that do not end in time."""
        for _, link in self._processes:
            link.close()
        for process, _ in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


PAUSE = 1.0
"""Seconds to wait before ranks are started again."""

FOR_EVER = 1e9


def make_connect_infos(
    config: EngineConfig, topology: Topology, environ: Mapping[str, str], patience: float
) -> list[rank_messages.ConnectInfo]:
    """Returns the connection data of each rank that this machine, or this process, starts.

    Raises:
        StartupError: the key file or a TLS file is unusable.
    """
    if config.group_key_file:
        GroupKey.read(config.group_key_file)
    tls_files(config).context(server=False)
    host, port = listen_address(config, environ)
    key_file = config.group_key_file or str(shared_key(config, environ))
    numbers = range(topology.first, topology.first + (1 if topology.alone else topology.here))
    return [
        rank_messages.ConnectInfo(
            address=host, port=port, rank=number, local=number % topology.here, local_world=topology.here,
            key_file=key_file,
            tls=tls_files(config), patience=patience, model=config.model,
            threads=requested_threads(config.threads, environ),
        )
        for number in numbers
    ]  # fmt: skip


def run_headless(config: EngineConfig, topology: Topology, environ: Mapping[str, str], again: bool) -> int:
    """Runs this machine's ranks until their engine ends; returns the exit code.

    Args:
        again: restart them for the next engine, until a signal arrives; False: return the exit code.

    Raises:
        StartupError: the engine cannot be reached, or belongs to another group.
    """
    said = make_connect_infos(config, topology, environ, FOR_EVER if again else 600.0)
    while True:
        who = (
            f"rank {topology.first}"
            if len(said) == 1
            else f"ranks {topology.first} to {topology.first + len(said) - 1}"
        )
        log.info("starting %s for the engine at %s:%d", who, said[0].address, said[0].port)
        ranks = HeadlessRanks(said)
        try:
            code = ranks.wait()
        finally:
            ranks.close()
        if not again:
            return code
        log.info("the engine has ended; waiting for its successor")
        time.sleep(PAUSE)
