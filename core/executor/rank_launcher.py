"""Starts ranks, links to them and ends them: on this machine over socket pairs, on others over TCP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from trencadis.core.config import EngineConfig
from trencadis.core.executor.rank_fingerprint import RankFingerprint
from trencadis.core.executor.rank_info import RankInfo, threads_of
from trencadis.core.links.link import Link, PlainLink
from trencadis.core.process.child_process import CLEANUPS, environment

FOLDER = "trencadis-ranks-"
"""How the name of a folder begins over which the ranks of an engine meet."""

LEFT_SECONDS = 3600.0
"""Age from which a folder of a process that is gone is removed by the next start."""

PATIENCE = 5.0
"""Seconds that ranks have to end by themselves before they are killed."""


class RankProcessHandle(Protocol):
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
class RemoteRankState:
    """Another rank.

    Args:
        linked: the link to it, once there is one.
        remote: its process was not started by this one, so that versions and files must be compared.
        fingerprint: what it would load; of remote ranks.
        gone: set when nothing comes from it any more.
        capturing: the bucket whose capture it has begun; empty: none.
    """

    rank_info: RankInfo
    process: RankProcessHandle
    linked: Future[Link]
    remote: bool = False
    fingerprint: Future[RankFingerprint] = field(default_factory=Future)
    ready: Future[None] = field(default_factory=Future)
    gone: Event = field(default_factory=Event)
    capturing: str = ""

    @property
    def number(self) -> int:
        """The rank."""
        return self.rank_info.rank

    @property
    def link(self) -> Link | None:
        """The link, where there is one."""
        done = self.linked.done() and not self.linked.cancelled() and self.linked.exception() is None
        return self.linked.result() if done else None

    @property
    def at(self) -> str:
        """The rank's machine, to be put behind its number."""
        return f" ({self.rank_info.host})" if self.rank_info.host else ""

    def describe_end(self, why: str) -> str:
        """Describes how the rank ended, from its exit code or ``why``."""
        if self.remote or why:  # one that is silent does not end by itself
            return why or "it closed its connection"
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def name_ranks(children: Sequence[RemoteRankState]) -> str:
    """The ranks in words."""
    numbers = ", ".join(str(child.number) for child in children)
    return f"rank {numbers}" if len(children) == 1 else f"ranks {numbers}"


class Launcher(Protocol):
    """Where ranks come from."""

    location_note: str
    """The address at which remote ranks come in; empty where there are none."""

    def describe_rank(self, number: int) -> RankInfo:
        """The place of any rank, 0 too."""
        ...

    def launch(self, number: int) -> RemoteRankState:
        """Starts a rank, or begins to wait for it."""
        ...

    def close(self) -> None:
        """Removes what the launcher made; ranks that still run are killed by then."""
        ...


class LocalLauncher:
    """Processes of this machine, which meet over a file in a folder of their own."""

    location_note = ""

    def __init__(self, config: EngineConfig, world: int) -> None:
        self._config, self._world = config, world
        _remove_left_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        CLEANUPS.append(self.close)

    def describe_rank(self, number: int) -> RankInfo:
        """All ranks are here."""
        stages = self._config.pipeline_parallel_size
        encodes = number < self._world // stages
        return RankInfo(number, self._world, str(self.folder / "store"), encodes=encodes, stages=stages)

    def launch(self, number: int) -> RemoteRankState:
        """Starts a process."""
        return start_local_rank(self._config, self.describe_rank(number))

    def close(self) -> None:
        """Removes the folder, which killed ranks cannot."""
        if self.close in CLEANUPS:
            CLEANUPS.remove(self.close)
        shutil.rmtree(self.folder, ignore_errors=True)


def _remove_left_folders() -> None:
    """Removes folders of engines of this user that were killed: the name says whose process it was.

    Those of the last hour stay: containers that share the folder do not see each other's processes.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        number = folder.name.removeprefix(FOLDER).partition("-")[0]
        try:
            found = folder.lstat()
        except OSError:
            continue
        old = time.time() - found.st_mtime > LEFT_SECONDS and found.st_uid == os.geteuid()
        if old and number.isdecimal() and Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def start_local_rank(config: EngineConfig, rank_info: RankInfo) -> RemoteRankState:
    """A rank's process on this machine, over a socket pair."""
    process, sock = spawn_rank(threads_of(config.threads, rank_info.local_world))
    linked: Future[Link] = Future()
    linked.set_result(PlainLink(sock))
    return RemoteRankState(rank_info, process, linked)


def spawn_rank(threads: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process of ``core.executor.rank_process``, and our end of its socket; it ends when that is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trencadis.core.executor.rank_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment(os.environ, threads, True),
        )
    return process, ours
