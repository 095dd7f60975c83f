"""The numbers and sizes of a rank; how many ranks can share a model; fingerprints of ranks. Torch-free.

By fingerprints, ranks on several machines check that they match before they load anything.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from trencadis.core import envs
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.errors import StartupError


@dataclass(frozen=True)
class RankInfo:
    """One rank of ``world``.

    Args:
        rendezvous: store through which the ranks set up their collectives: a private file, or ``tcp://host:port``.
        local: the local rank, which selects the card; None: all ranks are on one machine.
        ranks_on_machine: number of ranks on its machine; None: all.
        host: the machine's name if it is not the engine's machine.
        masked: True if the rank sees only its own card.
        encodes: True if the rank runs the vision tower; other ranks get Steps without pixels.
        stages: number of pipeline stages; the ranks of a stage, which share its layers, have consecutive numbers.
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
        """The number of this rank on its machine."""
        return self.rank if self.local is None else self.local

    @property
    def local_world(self) -> int:
        """The number of ranks on its machine."""
        return self.world if self.ranks_on_machine is None else self.ranks_on_machine

    @property
    def peers(self) -> int:
        """The number of ranks per stage."""
        return self.world // self.stages

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.rank // self.peers

    @property
    def peer(self) -> int:
        """The number of this rank within its stage."""
        return self.rank % self.peers

    @property
    def draws(self) -> bool:
        """True on the last stage, which samples tokens."""
        return self.stage == self.stages - 1

    @property
    def answers(self) -> bool:
        """True if this rank sends the results of Steps to rank 0."""
        return self.draws and self.peer == 0 and self.stages > 1

    @property
    def card(self) -> int:
        """Index of its card among the visible cards of the engine."""
        return 0 if self.masked else self.local_rank

    @property
    def cards(self) -> int:
        """Number of visible cards of the engine."""
        return 1 if self.masked else self.local_world


TCP = "tcp://"
"""Prefix of a rendezvous that is an address and not a file."""


def folder_of(rendezvous: str) -> Path | None:
    """Returns the folder of a rendezvous file; None for an address or an empty rendezvous."""
    return None if not rendezvous or rendezvous.startswith(TCP) else Path(rendezvous).parent


def can_share(model: ModelConfig, world: int) -> bool:
    """Returns True if ``world`` ranks can share the model, i.e. each gets whole heads and all KV heads that they
    use.
    """
    t, v = model.text, None if model.encoder_data_parallel else model.vision
    if world < 1 or t.heads % world or (t.joint_qk_norm and world > 1) or (v is not None and v.heads % world):
        return False
    if t.recurrent is not None and t.recurrent.units % world:
        return False
    return all(form.kv_heads % world == 0 or world % form.kv_heads == 0 for form in t.layer_forms)


def check_size(model: ModelConfig, world: int) -> None:
    """Raises StartupError if ``world`` ranks cannot share ``model``; the message lists the numbers that can."""
    if can_share(model, world):
        return
    t, v = model.text, model.vision
    heads = f"{t.heads} query heads and {t.kv_heads} KV heads"
    if t.recurrent is not None:
        heads += f", {t.recurrent.units} {t.recurrent.unit_name} of recurrent layers"
    if t.joint_qk_norm:
        heads += ", and norms over all of them"
    if v is not None:
        heads += f", and {v.heads} heads of the vision tower"
    fitting = ", ".join(str(w) for w in range(1, t.heads + 1) if can_share(model, w))
    raise StartupError(f"--tensor-parallel-size {world} does not divide {model.name}: it has {heads}; use {fitting}.")


def requested_threads(flag: int | None, environ: Mapping[str, str]) -> int | None:
    """Returns the requested CPU threads of the engine: ``--threads``, else OMP_NUM_THREADS; None: one per CPU.

    Raises:
        StartupError: OMP_NUM_THREADS is no number.
    """
    return flag or max(envs.get_int("OMP_NUM_THREADS", environ) or 0, 0) or None


def threads_of(asked: int | None, world: int) -> int:
    """Returns the CPU threads of each of ``world`` ranks; ``asked`` counts the threads of the whole engine."""
    return max((asked or computing_cpus()) // max(world, 1), 1)


SAMPLE = 4096
"""Bytes read at the start, in the middle and at the end of each large file."""

WHOLE = 4 << 20
"""Files up to this size in bytes are read completely."""

NAMED = {"trencadis": "Trencadis", "torch": "torch", "python": "Python", "checkpoint": "checkpoint"}


@dataclass(frozen=True)
class RankFingerprint:
    """Versions and a checkpoint digest, compared between the ranks of several machines."""

    trencadis: str
    python: str
    torch: str
    checkpoint: str


def compute_rank_fingerprint(model: str) -> RankFingerprint:
    """Returns the fingerprint of this process.

    Raises:
        StartupError: the folder ``model`` does not exist here.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return RankFingerprint(_version("trencadis"), python, _version("torch").partition("+")[0], checkpoint_digest(model))


def checkpoint_digest(model: str) -> str:
    """Returns a digest of a checkpoint's files: names, sizes and contents, for large files three samples.

    Raises:
        StartupError: there is no such folder.
    """
    if not model:
        return ""
    folder = Path(model)
    if not folder.is_dir():
        raise StartupError(f"there is no folder {model} on {platform.node()}: mount it there, or share HF_HOME.")
    made = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin", ".model")):
        size = path.stat().st_size
        made.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                made.update(file.read())
                continue
            for at in (0, size // 2, size - SAMPLE):
                file.seek(at)
                made.update(file.read(SAMPLE))
    return made.hexdigest()


def describe_differences(ours: RankFingerprint, theirs: RankFingerprint) -> str:
    """Describes the differences between two fingerprints; empty if there are none."""
    found = []
    for one in fields(RankFingerprint):
        mine, other = getattr(ours, one.name), getattr(theirs, one.name)
        if mine == other:
            continue
        if one.name == "checkpoint":
            found.append("the files of its checkpoint are others")
        else:
            found.append(f"it has {NAMED[one.name]} {other}, the engine {mine}")
    return ", ".join(found)


def _version(package: str) -> str:
    if package == "trencadis":  # an import of it would be a cycle
        return str(sys.modules[__name__.partition(".")[0]].__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
