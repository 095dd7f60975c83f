"""Starts ranks, links to them and ends them: on this machine over socket pairs, on others over TCP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from trencadis.core.config import EngineConfig
from trencadis.core.executor.facts import Facts
from trencadis.core.executor.ranks import Place, threads_of
from trencadis.core.links.link import Link, PlainLink
from trencadis.core.process.children import environment

PATIENCE = 5.0
"""Seconds that ranks have to end by themselves before they are killed."""


class Ending(Protocol):
    """How a rank is ended; ``subprocess.Popen`` is one."""

    def kill(self) -> None:
        """Ends it now; does not wait, and does nothing where it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        ...


@dataclass
class Child:
    """Another rank.

    Args:
        linked: the link to it, once there is one.
        remote: its process was not started by this one, so that versions and files must be compared.
        met: what it would load; of remote ranks.
        gone: set when nothing comes from it any more.
        capturing: the bucket whose capture it has begun; empty: none.
    """

    place: Place
    process: Ending
    linked: Future[Link]
    remote: bool = False
    met: Future[Facts] = field(default_factory=Future)
    ready: Future[None] = field(default_factory=Future)
    gone: Event = field(default_factory=Event)
    capturing: str = ""

    @property
    def number(self) -> int:
        """The rank."""
        return self.place.rank

    @property
    def link(self) -> Link | None:
        """The link, where there is one."""
        done = self.linked.done() and not self.linked.cancelled() and self.linked.exception() is None
        return self.linked.result() if done else None

    @property
    def at(self) -> str:
        """The rank's machine, to be put behind its number."""
        return f" ({self.place.host})" if self.place.host else ""

    def how(self, why: str) -> str:
        """How it has ended; ``why``: what its link says."""
        if self.remote:
            return why or "it closed its connection"
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def named(children: Sequence[Child]) -> str:
    """The ranks in words."""
    numbers = ", ".join(str(child.number) for child in children)
    return f"rank {numbers}" if len(children) == 1 else f"ranks {numbers}"


class Launcher(Protocol):
    """Where ranks come from."""

    where: str
    """The address at which remote ranks come in; empty where there are none."""

    def place(self, number: int) -> Place:
        """The place of any rank, 0 too."""
        ...

    def launch(self, number: int) -> Child:
        """Starts a rank, or begins to wait for it."""
        ...

    def close(self) -> None:
        """Removes what the launcher made; ranks that still run are killed by then."""
        ...


class LocalLauncher:
    """Processes of this machine, which meet over a file in a folder of their own."""

    where = ""

    def __init__(self, config: EngineConfig, world: int) -> None:
        self._config, self._world = config, world
        self.folder = Path(tempfile.mkdtemp(prefix="trencadis-ranks-"))

    def place(self, number: int) -> Place:
        """All ranks are here."""
        stages = self._config.pipeline_parallel_size
        encodes = number < self._world // stages
        return Place(number, self._world, str(self.folder / "store"), encodes=encodes, stages=stages)

    def launch(self, number: int) -> Child:
        """Starts a process."""
        return started(self._config, self.place(number))

    def close(self) -> None:
        """Removes the folder, which killed ranks cannot."""
        shutil.rmtree(self.folder, ignore_errors=True)


def started(config: EngineConfig, place: Place) -> Child:
    """A rank's process on this machine, over a socket pair."""
    process, sock = spawn_rank(threads_of(config.threads, place.local_world))
    linked: Future[Link] = Future()
    linked.set_result(PlainLink(sock))
    return Child(place, process, linked)


def spawn_rank(threads: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process of ``core.executor.rank``, and our end of its socket; it ends when that is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trencadis.core.executor.rank", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment(os.environ, threads, True),
        )
    return process, ours
