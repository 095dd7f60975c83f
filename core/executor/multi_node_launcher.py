"""Launches ranks on other machines or under torchrun: they connect to the engine over TCP
(``core.links.handshake``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from trencadis.core import envs
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.executor.rank_launcher import RemoteRankState, start_local_rank
from trencadis.core.links.group_key import SIZE, GroupKey, TlsFiles
from trencadis.core.links.message_link import Link
from trencadis.core.links.rank_listener import AuthListener
from trencadis.core.links.rank_placement import EXTERNAL, Topology


@dataclass
class RemoteRank:
    """Handle of a rank process that this engine did not start; closing its link ends it."""

    linked: Future[Link]

    def kill(self) -> None:
        """Closes the link, or cancels it if the rank has not connected yet."""
        if not self.linked.cancel() and self.linked.exception() is None:
            self.linked.result().close()

    def wait(self, timeout: float | None = None) -> int:
        """Returns 0, since the state of the remote process is unknown."""
        return 0


class NodesLauncher:
    """Starts the ranks of this machine, and waits for connections from those of other machines.

    Args:
        rendezvous: address of the ranks' store (``process_groups.serve_store``).
        key_file: a temporary key file, removed by ``close``.
    """

    def __init__(
        self,
        config: EngineConfig,
        topology: Topology,
        listener: AuthListener,
        rendezvous: str,
        key_file: Path | None = None,
    ) -> None:
        self._config, self._topology, self._listener = config, topology, listener
        self._rendezvous, self._key_file = rendezvous, key_file
        host, port = listener.address
        self.location_note = f"{host}:{port}"

    def describe_rank(self, number: int) -> RankInfo:
        """Returns the info of any rank; all machines have the same number of ranks, in order."""
        here = self._topology.here
        host = "" if number < here else f"node {number // here}"
        world, stages = self._topology.world, self._config.pipeline_parallel_size
        encodes = number < world // stages
        return RankInfo(number, world, self._rendezvous, number % here, here, host, encodes=encodes, stages=stages)

    def launch(self, number: int) -> RemoteRankState:
        """Starts a process for a local rank, or waits for the connection of a remote one."""
        rank_info = self.describe_rank(number)
        if number not in self._listener.links:
            return start_local_rank(self._config, rank_info)
        linked = cast("Future[Link]", self._listener.links[number])
        return RemoteRankState(rank_info, RemoteRank(linked), linked, remote=True)

    def close(self) -> None:
        """Closes the listener, and removes the key file that torchrun's processes of one machine share."""
        self._listener.close()
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)


def open_listener(
    config: EngineConfig, topology: Topology, environ: Mapping[str, str]
) -> tuple[AuthListener, Path | None]:
    """Returns a listener for ranks that are started elsewhere, and the key file if one was created for it.

    Raises:
        StartupError: the address cannot be listened on, or a key or TLS file is unusable.
    """
    host, port = listen_address(config, environ)
    expected = range(1 if topology.alone else topology.here, topology.world)
    context = tls_files(config).context(server=True)
    made = None if config.group_key_file else shared_key(config, environ)
    if made is not None:
        _write(made)
    return AuthListener((host, port), GroupKey.read(str(made or config.group_key_file)), expected, context), made


def listen_address(config: EngineConfig, environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns (host, port) on which the engine listens for ranks."""
    host = envs.get("MASTER_ADDR", environ) if config.distributed_executor_backend == EXTERNAL else config.master_addr
    return host or config.master_addr, config.master_port


def tls_files(config: EngineConfig) -> TlsFiles:
    """Returns the TLS files of the configuration."""
    return TlsFiles(config.group_tls_cert, config.group_tls_key, config.group_tls_ca)


def shared_key(config: EngineConfig, environ: Mapping[str, str]) -> Path:
    """Returns the file through which rank 0 shares a key with torchrun's other processes, in a private folder of
    the user.
    """
    cache = envs.get("TRENCADIS_CACHE", environ)
    folder = Path(cache) if cache else Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trencadis"
    run = f"{environ.get('TORCHELASTIC_RUN_ID')} {environ.get('MASTER_PORT')} {config.master_port}"
    return folder / "groups" / f"{hashlib.sha256(run.encode()).hexdigest()[:16]}.key"


def _write(path: Path) -> None:
    """Writes a new secret atomically to a file that only this user can read.

    Raises:
        StartupError: the file cannot be written.
    """
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        with suppress(FileNotFoundError):
            new.unlink()
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(SIZE).hex().encode())
        new.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}; TRENCADIS_CACHE names another folder") from None
