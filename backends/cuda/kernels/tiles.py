"""Tile sizes from tables, never tuned while serving: ``tools/tune_kernels.py`` writes ``tiles/<kernel>.csv``.

A line holds architecture, bits of a value, the largest head and group it serves, length class, then the tile. The first
line that fits counts.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "tiles"
INTERPRETED = 90
"""Architecture whose tiles are used where there is no GPU."""


class Tile(NamedTuple):
    """m: queries (times heads of a group), n: keys of a step; warps and pipeline stages of a program."""

    m: int
    n: int
    warps: int
    stages: int


class TileEntry(NamedTuple):
    """A line of a table."""

    arch: int  # 80, 86, 89, 90: compute capability x 10
    bits: int  # 16 or 32
    head: int
    group: int
    length: str  # "any", or a class that the kernel names
    tile: Tile


FORCED: dict[str, Tile] = {}
"""Tiles that stand in for the tables' while ``tools/tune_kernels.py`` or a test measures them."""


def pick(kernel: str, q: Tensor, group: int, length: str = "any") -> Tile:
    """The tile for queries like ``q`` [tokens, heads, d], ``group`` query heads to a KV head."""
    return FORCED.get(kernel) or find(kernel, arch_of(q.device), q.dtype.itemsize * 8, q.shape[2], group, length)


@cache
def find(kernel: str, arch: int, bits: int, head: int, group: int, length: str) -> Tile:
    """The first fitting entry; newer architectures use the newest that is listed below them.

    Raises:
        LookupError: no line fits.
    """
    entries = table(kernel)
    known = max((e.arch for e in entries if e.arch <= arch), default=0)
    for e in entries:
        if (e.arch, e.bits) == (known, bits) and head <= e.head and group <= e.group and e.length in (length, "any"):
            return e.tile
    raise LookupError(f"{kernel}: no tile for sm_{arch}, {bits} bits, heads of {head}, groups of {group}, {length}")


@cache
def table(kernel: str) -> tuple[TileEntry, ...]:
    """The lines of ``tiles/<kernel>.csv``."""
    with (FOLDER / f"{kernel}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            TileEntry(
                int(x["arch"]), int(x["bits"]), int(x["head"]), int(x["group"]), x["length"],
                Tile(int(x["m"]), int(x["n"]), int(x["warps"]), int(x["stages"])),
            )
            for x in csv.DictReader(file)
        )  # fmt: skip


@cache
def arch_of(device: torch.device) -> int:
    """Compute capability x 10."""
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def power(size: int) -> int:
    """The power of two that holds ``size``: what a dimension of a tile must be."""
    return 1 << (size - 1).bit_length()


def lanes(d: int) -> int:
    """Lanes of a head of ``d`` values; a product needs 16."""
    return max(power(d), 16)
