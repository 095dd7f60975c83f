"""Runs this machine's ranks for an engine elsewhere: ``--headless``, and torchrun's processes beside the first."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from trencadis.core.config import EngineConfig
from trencadis.core.executor import frames
from trencadis.core.executor.dial import Followers
from trencadis.core.executor.nodes import address, files, shared_key
from trencadis.core.executor.ranks import asked_threads
from trencadis.core.links.secret import GroupKey
from trencadis.core.links.topology import Topology

log = logging.getLogger("trencadis.engine")

PAUSE = 1.0
"""Seconds before ranks are started again."""

FOR_EVER = 1e9


def dials(config: EngineConfig, lie: Topology, environ: Mapping[str, str], patience: float) -> list[frames.Dial]:
    """What each rank of this machine, or of this process, is told.

    Raises:
        StartupError: the key or a file of TLS is no good.
    """
    if config.group_key_file:
        GroupKey.read(config.group_key_file)
    files(config).context(server=False)
    host, port = address(config, environ)
    key_file = config.group_key_file or str(shared_key(config, environ))
    numbers = range(lie.first, lie.first + (1 if lie.alone else lie.here))
    return [
        frames.Dial(
            address=host, port=port, rank=number, local=number % lie.here, beside=lie.here, key_file=key_file,
            tls=files(config), patience=patience, model=config.model, threads=asked_threads(config.threads, environ),
        )
        for number in numbers
    ]  # fmt: skip


def follow(config: EngineConfig, lie: Topology, environ: Mapping[str, str], again: bool) -> int:
    """Runs ranks until their engine ends.

    Args:
        again: starts them anew for the engine's successor, until a signal comes; else returns the exit code.

    Raises:
        StartupError: the engine cannot be reached, or is of another group.
    """
    said = dials(config, lie, environ, FOR_EVER if again else 600.0)
    while True:
        who = f"rank {lie.first}" if len(said) == 1 else f"ranks {lie.first} to {lie.first + len(said) - 1}"
        log.info("starting %s for the engine at %s:%d", who, said[0].address, said[0].port)
        ranks = Followers(said)
        try:
            code = ranks.wait()
        finally:
            ranks.close()
        if not again:
            return code
        log.info("the engine has ended; waiting for its successor")
        time.sleep(PAUSE)
