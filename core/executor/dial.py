"""How a rank reaches its engine on another machine, and how a machine starts such ranks."""

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
from trencadis.core.executor import frames
from trencadis.core.executor.launcher import PATIENCE, spawn_rank
from trencadis.core.executor.ranks import threads_of
from trencadis.core.links.handshake import LIMIT, NotOurs, as_rank
from trencadis.core.links.keyed import KeyedLink
from trencadis.core.links.link import LinkClosed, PlainLink
from trencadis.core.links.secret import GroupKey
from trencadis.core.links.stream import ByteStream, PlainStream, TlsStream

log = logging.getLogger("trencadis.engine")

AGAIN = 0.3
"""Seconds between two attempts."""

REFUSALS = 5
"""Attempts that the engine may refuse in a row; one that restarts refuses some."""


def dialled(dial: frames.Dial) -> KeyedLink:
    """The link to the engine; tries until it answers.

    Raises:
        StartupError: it does not answer in time, or it is another group's.
    """
    end, refused = time.monotonic() + dial.patience, 0
    context = dial.tls.context(server=False)
    while True:
        try:
            key = GroupKey(dial.key) if dial.key else GroupKey.read(dial.key_file)
            sock = socket.create_connection((dial.address, dial.port), LIMIT)
            try:
                stream: ByteStream
                stream = PlainStream(sock) if context is None else TlsStream(sock, context, False, LIMIT)
                return as_rank(stream, key, dial.rank)
            except BaseException:
                sock.close()
                raise
        except NotOurs as error:
            refused += 1
            if refused >= REFUSALS:
                raise StartupError(f"rank {dial.rank}: {dial.address}:{dial.port}: {error}") from None
        except (OSError, StartupError) as error:
            if time.monotonic() > end:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise StartupError(
                    f"rank {dial.rank}: no engine answers at {dial.address}:{dial.port} ({why}): --master-addr and "
                    "--master-port name it"
                ) from None
        time.sleep(AGAIN)


class Followers:
    """The ranks of this machine for an engine elsewhere, as processes that end with this object."""

    def __init__(self, dials: Sequence[frames.Dial]) -> None:
        self._ended: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._processes: list[tuple[subprocess.Popen[bytes], PlainLink]] = []
        try:
            for dial in dials:
                process, sock = spawn_rank(threads_of(dial.threads, dial.beside))
                link = PlainLink(sock)
                self._processes.append((process, link))
                link.send(frames.encode(dial))
                threading.Thread(target=self._watch, args=(dial, process, link), daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _watch(self, dial: frames.Dial, process: subprocess.Popen[bytes], link: PlainLink) -> None:
        said = ""
        with suppress(LinkClosed):
            while True:
                match frames.decode_up(link.receive()):
                    case frames.Linked():
                        log.info("rank %d has reached the engine at %s:%d", dial.rank, dial.address, dial.port)
                    case frames.RankFailure(message, _):
                        said = message
        self._ended.put((process.wait(), said))

    def wait(self) -> int:
        """Waits until one of the ranks has ended, then ends the others; its exit code.

        Raises:
            StartupError: it could not reach the engine.
        """
        code, said = self._ended.get()
        self.close()
        if said:
            raise StartupError(said)
        return code

    def close(self) -> None:
        """Ends them."""
        for _, link in self._processes:
            link.close()
        for process, _ in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
