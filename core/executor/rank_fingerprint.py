"""Fingerprints by which ranks on several machines check that they match before they load anything. Torch-free."""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from trencadis.core.errors import StartupError

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
