"""Runs this machine's ranks for an engine on another machine: ``--headless``, and all torchrun processes but the
first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from trencadis.core.config import EngineConfig
from trencadis.core.executor import rank_messages
from trencadis.core.executor.engine_connection import HeadlessRanks
from trencadis.core.executor.nodes_launcher import listen_address, shared_key, tls_files
from trencadis.core.executor.rank_info import requested_threads
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.topology import Topology

log = logging.getLogger("trencadis.engine")

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
