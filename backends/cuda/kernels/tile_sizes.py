"""Tile sizes from tables, never tuned while serving: ``tools/tune_kernels.py`` writes ``tiles/<kernel>.csv``.

A line has architecture, bits of a value, the largest head and group it is for, length class, then the tile. The first
line that fits is used. An architecture without a fitting line uses those of ``KIN``.

Importing this module checks that every tile fits the shared memory of a program, by what the kernels store there.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.gpu_platform import in_use

FOLDER = Path(__file__).parent / "tiles"
INTERPRETED = 90
"""Architecture whose tiles are used without a GPU."""


class Tile(NamedTuple):
    """m: queries (times heads of a group), n: keys of a step; warps and pipeline stages of a program."""

    m: int
    n: int
    warps: int
    stages: int


class TileEntry(NamedTuple):
    """One line of a table."""

    arch: int  # compute capability x 10
    bits: int  # 16 or 32
    head: int
    group: int
    length: str  # "any", or a length class of the kernel
    tile: Tile


SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Architecture that tiles are compiled for -> bytes of shared memory that one program may use (CUDA C++
Programming Guide, "Technical Specifications per Compute Capability")."""

KIN = {100: 90, 120: 89}
"""Architecture -> the one whose tiles it uses, with the same shared memory, warps and registers.

It has lines of its own only where its compiler would spill, or where other tiles keep more programs on a processor.
"""

FORCED: dict[str, Tile] = {}
"""Tiles that replace the tables' while ``tools/tune_kernels.py`` or a test measures them."""


def pick(kernel: str, q: Tensor, group: int, *lengths: str) -> Tile:
    """Returns the tile for queries like ``q`` [tokens, heads, d], with ``group`` query heads per KV head.

    Args:
        lengths: classes of which the launch is; lines of the first go before those of the next. None: "any".
    """
    bits, wanted = q.dtype.itemsize * 8, lengths or ("any",)
    return FORCED.get(kernel) or find(kernel, arch_of(q.device), bits, q.shape[2], group, *wanted)


@cache
def find(kernel: str, arch: int, bits: int, head: int, group: int, *lengths: str) -> Tile:
    """Returns the first fitting entry; an architecture that is not listed uses the newest listed one below it.

    Raises:
        LookupError: no line fits.
    """
    for length in lengths:
        allowed = (length, "any") if length == lengths[-1] else (length,)
        for e in entries(kernel, max((a for a in SHARED if a <= arch), default=0)):
            if e.bits == bits and head <= e.head and group <= e.group and e.length in allowed:
                return e.tile
    said = " or ".join(lengths)
    raise LookupError(f"{kernel}: no tile for sm_{arch}, {bits} bits, heads of {head}, groups of {group}, {said}")


@cache
def entries(kernel: str, arch: int) -> tuple[TileEntry, ...]:
    """Returns the lines for ``arch``, one of ``SHARED``.

    They are its own, and those of ``KIN`` for bits, heads and lengths of which it has none.
    """
    own = tuple(e for e in table(kernel) if e.arch == arch)
    taken = {(e.bits, e.head, e.length) for e in own}
    kin = (e._replace(arch=arch) for e in table(kernel) if e.arch == KIN.get(arch))
    found = [*own, *(e for e in kin if (e.bits, e.head, e.length) not in taken)]
    return tuple(sorted(found, key=lambda e: (e.bits, e.head)))


@cache
def table(kernel: str) -> tuple[TileEntry, ...]:
    """Reads the lines of ``tiles/<kernel>.csv``."""
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
    """Returns compute capability x 10; ``INTERPRETED`` for a CPU."""
    cards = in_use()
    return cards.architecture(device) if device.type == cards.name else INTERPRETED


def has_warp_group_products(arch: int) -> bool:
    """Returns True where a product of 16 bits and at least 64 rows is issued by groups of four warps, or by tensor
    memory.
    """
    return 90 <= arch < 120


def power(size: int) -> int:
    """Returns the smallest power of two >= ``size``; dimensions of a tile must be powers of two."""
    return 1 << (size - 1).bit_length()


def lanes(d: int) -> int:
    """Returns the lanes of a head of ``d`` values: a power of two, at least 16, which a product needs."""
    return max(power(d), 16)


def need(kernel: str, e: TileEntry) -> int:
    """Returns the bytes of shared memory that a program of attention takes, at most, at the largest head of ``e``.

    These are keys and values of a step, as often as the pipeline holds them: products by warp groups (from sm_90 to
    sm_119, at least 64 rows) read the step that they compute from there, others hold it in registers. Added to them are
    the queries; the scores, if warps share rows of them or two steps are held (on sm_100 also with decoded codes); a
    step of decoded codes; and 2 KiB for sums across warps and for barriers.
    """
    tile, values, size = e.tile, lanes(e.head), e.bits // 8
    coded = kernel.endswith("_codes")
    grouped = has_warp_group_products(e.arch) and tile.m >= 64 and size == 2
    steps = tile.stages if grouped else max(tile.stages - 1, 1)
    step = 2 * tile.n * values * (1 if coded else size)
    shared = tile.m < 16 * tile.warps or tile.stages == 2 or (coded and grouped and e.arch >= 100)
    scores = tile.m * tile.n * size if shared else 0
    opened = tile.n * values * size if coded else 0
    return steps * step + tile.m * values * size + scores + opened + (2 << 10)


def check(kernel: str, arch: int) -> None:
    """Checks that every attention tile for ``arch`` fits its shared memory.

    Raises:
        ImportError: one does not; the message names it.
    """
    for e in entries(kernel, arch):
        if need(kernel, e) > SHARED[arch]:
            raise ImportError(
                f"tiles/{kernel}.csv: {e.tile} for sm_{arch}, {e.bits} bits, heads of {e.head} takes {need(kernel, e)} "
                f"bytes of shared memory of {SHARED[arch]}; smaller steps or fewer stages fit"
            )


for _kernel in sorted(path.stem for path in FOLDER.glob("attend_*.csv")):
    for _arch in SHARED:
        check(_kernel, _arch)
