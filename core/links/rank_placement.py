"""Placement of an engine's ranks on machines, from flags and torchrun's variables. Torch-free.

Chooses between this machine and Ray for the ranks if no flag says so: by the cards of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

from trencadis.core import devices, envs
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError

UNI, MP, EXTERNAL, RAY = "uni", "mp", "external_launcher", "ray"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
"""Variables that torchrun sets for each process.

It also sets LOCAL_WORLD_SIZE, and MASTER_PORT, which is the port of torchrun's own store.
"""


@dataclass(frozen=True)
class Topology:
    """Ranks [first, first + here) of ``world`` ranks on ``nodes`` machines are on this machine.

    Args:
        backend: uni, mp, external_launcher or ray.
        alone: True if this process runs only its own rank, because others are started separately (external_launcher).
    """

    backend: str
    world: int
    nodes: int = 1
    first: int = 0
    here: int = 1
    alone: bool = False

    @property
    def over_hosts(self) -> bool:
        """True if ranks connect over TCP."""
        return self.nodes > 1 or self.alone

    @property
    def leads(self) -> bool:
        """True if rank 0, and with it the engine, is on this machine."""
        return self.first == 0


def world_of(config: EngineConfig) -> int:
    """Returns the number of ranks of one engine."""
    return config.ranks


def describe_sizes(config: EngineConfig) -> str:
    """Returns the names of the flags that determine the number of ranks."""
    stages = " times --pipeline-parallel-size" if config.pipeline_parallel_size > 1 else ""
    return f"--tensor-parallel-size{stages}"


def topology(config: EngineConfig, environ: Mapping[str, str]) -> Topology:
    """Returns the placement of this process's ranks.

    Raises:
        StartupError: flags contradict each other, or torchrun's variables are missing or inconsistent.
    """
    world, backend = world_of(config), config.distributed_executor_backend
    if backend == UNI and world > 1:
        raise StartupError(f"--distributed-executor-backend uni is one rank, and there are {world}; leave it out (mp).")
    if backend == EXTERNAL:
        _one_node(config)
        return _torchrun(config, world, environ)
    if backend == RAY:
        _one_node(config)
        return Topology(RAY, world, here=1)
    if config.headless and config.nnodes == 1:
        raise StartupError("--headless starts ranks for an engine on another node: name --nnodes and --node-rank too.")
    if config.nnodes == 1:
        if config.node_rank:
            raise StartupError(f"--node-rank {config.node_rank} of --nnodes 1; nodes count from 0.")
        return Topology(MP if world > 1 else UNI, world, here=world)
    return _nodes(config, world)


def _one_node(config: EngineConfig) -> None:
    if config.nnodes > 1 or config.headless:
        raise StartupError(
            f"--nnodes and --headless start ranks by hand; --distributed-executor-backend "
            f"{config.distributed_executor_backend} starts them itself: leave one of both out."
        )


def _nodes(config: EngineConfig, world: int) -> Topology:
    nodes, node = config.nnodes, config.node_rank
    if world % nodes:
        raise StartupError(
            f"--nnodes {nodes} does not divide {world} ranks ({describe_sizes(config)}); each node has as many."
        )
    if node >= nodes:
        raise StartupError(f"--node-rank {node} of --nnodes {nodes}; nodes count from 0.")
    if bool(node) != config.headless:
        remedy = "add --headless: the server is on node 0" if node else "leave out --headless: node 0 is the server"
        raise StartupError(f"--node-rank {node}: {remedy}.")
    here = world // nodes
    _check_span(config, here)
    if not config.group_key_file:
        raise StartupError(NO_KEY)
    return Topology(MP, world, nodes, node * here, here)


NO_KEY = (
    "ranks on several machines need a key that others do not know: head -c 32 /dev/urandom | base64 > group.key, "
    "chmod 600 group.key, and --group-key-file group.key on each machine."
)


def _check_span(config: EngineConfig, here: int) -> None:
    size = config.tensor_parallel_size
    if here % size and not config.allow_tp_over_nodes:
        raise StartupError(
            f"--tensor-parallel-size {size} would span machines of {here} ranks, and every layer would wait for the "
            "network; --allow-tp-over-nodes does it all the same."
        )


def _torchrun(config: EngineConfig, world: int, environ: Mapping[str, str]) -> Topology:
    missing = [name for name in TORCHRUN if not environ.get(name)]
    if missing:
        raise StartupError(
            f"--distributed-executor-backend external_launcher: {', '.join(missing)} is not set: start it with "
            f"torchrun --no-python --nproc-per-node {world} trencadis serve ..."
        )
    rank, size, local = (envs.get_int(name, environ) or 0 for name in TORCHRUN[:3])
    if size != world:
        raise StartupError(f"torchrun started {size} processes and {describe_sizes(config)} asks for {world} ranks.")
    here = envs.get_int("LOCAL_WORLD_SIZE", environ) or size
    if not 0 <= local <= rank < size or here > size:
        raise StartupError(f"RANK {rank}, LOCAL_RANK {local}, WORLD_SIZE {size}, LOCAL_WORLD_SIZE {here}: torchrun "
                           "counts otherwise.")  # fmt: skip
    nodes = -(-size // here)
    if nodes > 1:
        _check_span(config, here)
        if not config.group_key_file:
            raise StartupError(NO_KEY)
    return Topology(EXTERNAL, world, nodes, rank, here, alone=True)


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
