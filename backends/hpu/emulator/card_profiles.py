"""Devices that can be emulated, as data."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.errors import StartupError
from trencadis.core.memory.estimate import GRAPH

GIB = 1 << 30


@dataclass(frozen=True)
class Profile:
    """One kind of card.

    Args:
        total: bytes of memory that the plug-in finds on it.
        moves: True if memory is defragmented when a request finds no hole.
        graph_bytes: bytes of a graph besides its outputs and the tensors that it keeps.
        compile_base: virtual seconds to compile a recipe; an estimate, no measurement.
        compile_per_op: virtual seconds more for each operation in it; an estimate, no measurement.
        max_ops: operations between two cuts above which compilation is refused.
        block_softmax: True if its plug-in has the kernel that joins blocks of a decoding row.
        fp8_top: the largest e4m3 float of 8 bits.
        column: the card's column of dtypes in the tables of operations.
        bandwidth: bytes of memory a second, of its data sheet.
        host_copy: bytes a second to the host and back, an estimate; the cost of an operation on the host's CPU.
        hccl: bytes that the plug-in's pool leaves to HCCL where the card is opened as one of several ranks.
    """

    name: str
    total: int
    moves: bool = True
    graph_bytes: int = GRAPH
    compile_base: float = 0.25
    compile_per_op: float = 0.01
    max_ops: int = 4096
    block_softmax: bool = False
    fp8_top: float = 240.0
    column: str = "gaudi2"
    bandwidth: float = 2.45e12
    host_copy: float = 10e9
    hccl: int = 384 << 20


PROFILES = {
    "gaudi2": Profile("Gaudi 2", int(94.62 * GIB)),
    "gaudi3": Profile(
        "Gaudi 3", int(126.5 * GIB), block_softmax=True, fp8_top=448.0, column="gaudi3", bandwidth=3.7e12
    ),
}
"""Memory sizes from logs of the two cards, of nominally 96 and 128 GiB: docs/hpu-internals.md gives the sources."""


def profile(name: str) -> Profile:
    """Returns the profile called ``name``; empty means Gaudi 2."""
    found = PROFILES.get(name or "gaudi2")
    if found is None:
        raise StartupError(f"no emulated device {name!r}; there are: {', '.join(PROFILES)}")
    return found
