"""Chooses between this machine and Ray for the ranks if no flag says so: by the cards of this machine. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

from trencadis.core import devices, envs
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.links.topology import MP, RAY, describe_sizes


def choose_executor_backend(config: EngineConfig, environ: Mapping[str, str]) -> tuple[EngineConfig, str]:
    """Returns ``config`` with the executor backend ``ray`` if none is set and this machine has fewer cards than ranks.

    Ray is chosen only if it is installed or RAY_ADDRESS names a cluster; it is not imported here. Nothing changes if
    other flags determine the placement: ``--nnodes``, the CPU, a simulated card, a card given by index.

    Returns:
        The configuration, and a line for the user or "".

    Raises:
        StartupError: there are too few cards and no Ray, or a variable that names cards cannot be read.
    """
    if config.distributed_executor_backend or config.nnodes > 1 or config.headless:
        return config, ""
    found = devices.cards(config.device, config.policy, environ)
    if found is None or config.ranks <= found[0]:
        return config, ""
    (count, why), ranks = found, config.ranks
    want = (
        f"{ranks} ranks ({describe_sizes(config)}) need {ranks} cards"
        if ranks > 1
        else f"--device {config.device} needs a card"
    )
    few = f"{want} and {why}"
    if envs.get("RAY_ADDRESS", environ) or find_spec("ray") is not None:
        line = f"{few}: Ray is asked for them (--distributed-executor-backend mp: only this machine)"
        return replace(config, distributed_executor_backend=RAY), line
    if not count:
        return config, ""  # the device reports why there is none
    raise StartupError(
        f"{few}: take fewer, or cards of several machines: --nnodes, or a Ray cluster (pip install 'trencadis[ray]')"
    )


def on_this_machine(config: EngineConfig) -> EngineConfig:
    """Returns ``config`` for an engine that has been placed on the node with its cards.

    Ranks then run on this machine only, so that missing cards are an error.
    """
    return config if config.distributed_executor_backend else replace(config, distributed_executor_backend=MP)
