"""Starts, connects and ends ranks: on this machine over socket pairs, on others over TCP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.rank_info_and_fingerprint import RankFingerprint, RankInfo, threads_of
from trencadis.core.links.message_link import Link, PlainLink
from trencadis.core.process.child_process_environment_and_exit import CLEANUPS, RANK_FOLDER, environment, spawn_child

LEFT_SECONDS = 3600.0
"""Age from which a folder of a process that is gone is removed by the next start."""

PATIENCE = 5.0
"""Seconds that ranks have to exit by themselves before they are killed."""


class RankProcessHandle(Protocol):
    """Handle to end a rank, e.g. a ``subprocess.Popen``."""

    def kill(self) -> None:
        """Ends the rank at once without waiting; does nothing if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the rank to end and returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        ...


@dataclass
class RemoteRankState:
    """The engine's state of another rank.

    Args:
        linked: future of the link to it.
        remote: True if another machine started its process, so that versions and files must be compared.
        fingerprint: versions and checkpoint of a remote rank.
        gone: set when its link is closed.
        capturing: the bucket that it is capturing; empty: none.
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
        """The number of the rank."""
        return self.rank_info.rank

    @property
    def link(self) -> Link | None:
        """The link, or None if the rank is not connected."""
        done = self.linked.done() and not self.linked.cancelled() and self.linked.exception() is None
        return self.linked.result() if done else None

    @property
    def at(self) -> str:
        """The rank's machine in parentheses, to append to its number; empty for the engine's machine."""
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
    """Returns the ranks as text, e.g. ``ranks 1, 2``."""
    numbers = ", ".join(str(child.number) for child in children)
    return f"rank {numbers}" if len(children) == 1 else f"ranks {numbers}"


class Launcher(Protocol):
    """Starts ranks, or waits for ranks that are started elsewhere."""

    location_note: str
    """The address to which remote ranks connect; empty if there are none."""

    def describe_rank(self, number: int) -> RankInfo:
        """Returns the info of any rank, including 0."""
        ...

    def launch(self, number: int) -> RemoteRankState:
        """Starts a rank, or starts waiting for its connection."""
        ...

    def close(self) -> None:
        """Removes everything that the launcher created; ranks that still run have been killed before."""
        ...


class LocalLauncher:
    """Starts ranks as processes of this machine, which share a file store in a temporary folder."""

    location_note = ""

    def __init__(self, config: EngineConfig, world: int) -> None:
        self._config, self._world = config, world
        _remove_left_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{RANK_FOLDER}{os.getpid()}-"))
        CLEANUPS.append(self.close)

    def describe_rank(self, number: int) -> RankInfo:
        """Returns the info of a rank; all are on this machine."""
        stages = self._config.pipeline_parallel_size
        encodes = number < self._world // stages
        return RankInfo(number, self._world, str(self.folder / "store"), encodes=encodes, stages=stages)

    def launch(self, number: int) -> RemoteRankState:
        """Starts the rank's process."""
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
    for folder in Path(tempfile.gettempdir()).glob(f"{RANK_FOLDER}*-*"):
        number = folder.name.removeprefix(RANK_FOLDER).partition("-")[0]
        try:
            found = folder.lstat()
        except OSError:
            continue
        old = time.time() - found.st_mtime > LEFT_SECONDS and found.st_uid == os.geteuid()
        if old and number.isdecimal() and Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def start_local_rank(config: EngineConfig, rank_info: RankInfo) -> RemoteRankState:
    """Starts a rank's process on this machine, connected by a socket pair."""
    process, sock = spawn_rank(threads_of(config.threads, rank_info.local_world))
    linked: Future[Link] = Future()
    linked.set_result(PlainLink(sock))
    return RemoteRankState(rank_info, process, linked)


def spawn_rank(threads: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts ``core.executor.rank_process``; returns the process and this end of its socket.

    The process ends when the socket is closed.
    """
    return spawn_child("trencadis.core.executor.rank_process", environment(os.environ, threads, True))
