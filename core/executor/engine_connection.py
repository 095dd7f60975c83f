"""Connects ranks of this machine to an engine on another machine."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.rank_info import threads_of
from trencadis.core.executor.rank_launcher import PATIENCE, spawn_rank
from trencadis.core.links.byte_stream import ByteStream, PlainStream, TlsStream
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.handshake import LIMIT, HandshakeFailed, handshake_as_rank
from trencadis.core.links.keyed_link import KeyedLink
from trencadis.core.links.link import LinkClosed, PlainLink

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
