"""Checks how many ranks can share a model; a rank's number and sizes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.core import envs
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.errors import StartupError


@dataclass(frozen=True)
class RankInfo:
    """One rank of ``world``.

    Args:
        rendezvous: where the ranks of an engine meet for their collectives: a file that only they know, or
            ``tcp://host:port``.
        local: the rank among those of its machine, which counts its card; None: all ranks are on one machine.
        ranks_on_machine: how many ranks its machine has; None: all.
        host: the machine, where it is not the engine's.
        masked: whether the rank sees its own card alone.
        encodes: whether the rank runs the vision tower; the others get Steps without pixels.
        stages: pipeline stages; the ranks of a stage, which share its layers, follow one another.
    """

    rank: int = 0
    world: int = 1
    rendezvous: str = ""
    local: int | None = None
    ranks_on_machine: int | None = None
    host: str = ""
    masked: bool = False
    encodes: bool = True
    stages: int = 1

    @property
    def local_rank(self) -> int:
        """The rank among those of its machine."""
        return self.rank if self.local is None else self.local

    @property
    def local_world(self) -> int:
        """Ranks of its machine."""
        return self.world if self.ranks_on_machine is None else self.ranks_on_machine

    @property
    def peers(self) -> int:
        """Ranks of a stage."""
        return self.world // self.stages

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.rank // self.peers

    @property
    def peer(self) -> int:
        """This rank's number among those of its stage."""
        return self.rank % self.peers

    @property
    def draws(self) -> bool:
        """Whether it is on the last stage, which draws tokens."""
        return self.stage == self.stages - 1

    @property
    def answers(self) -> bool:
        """Whether it sends the results of Steps to rank 0."""
        return self.draws and self.peer == 0 and self.stages > 1

    @property
    def card(self) -> int:
        """The number of its card among those that it sees and that its engine has."""
        return 0 if self.masked else self.local_rank

    @property
    def cards(self) -> int:
        """How many cards of its engine it sees."""
        return 1 if self.masked else self.local_world


TCP = "tcp://"
"""Before the address of a rendezvous that is no file."""


def folder_of(rendezvous: str) -> Path | None:
    """The folder of a rendezvous that is a file."""
    return None if not rendezvous or rendezvous.startswith(TCP) else Path(rendezvous).parent


def can_share(model: ModelConfig, world: int) -> bool:
    """Whether ``world`` ranks can share the model: each has whole heads and all KV heads that they read."""
    t, v = model.text, None if model.encoder_data_parallel else model.vision
    if world < 1 or t.heads % world or (v is not None and v.heads % world):
        return False
    return t.kv_heads % world == 0 or world % t.kv_heads == 0


def check_size(model: ModelConfig, world: int) -> None:
    """Raises StartupError if ``world`` ranks cannot share ``model``; the line names the numbers that can."""
    if can_share(model, world):
        return
    t, v = model.text, model.vision
    heads = f"{t.heads} query heads and {t.kv_heads} KV heads"
    if v is not None:
        heads += f", and {v.heads} heads of the vision tower"
    fitting = ", ".join(str(w) for w in range(1, t.heads + 1) if can_share(model, w))
    raise StartupError(f"--tensor-parallel-size {world} does not divide {model.name}: it has {heads}; use {fitting}.")


def requested_threads(flag: int | None, environ: Mapping[str, str]) -> int | None:
    """CPU threads asked for the whole engine: ``--threads``, else OMP_NUM_THREADS; None: as many as there are CPUs.

    Raises:
        StartupError: OMP_NUM_THREADS is no number.
    """
    return flag or max(envs.get_int("OMP_NUM_THREADS", environ) or 0, 0) or None


def threads_of(asked: int | None, world: int) -> int:
    """CPU threads of each of ``world`` ranks; ``asked``: threads of the whole engine."""
    return max((asked or computing_cpus()) // max(world, 1), 1)
