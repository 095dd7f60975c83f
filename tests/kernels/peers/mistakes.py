"""Mistakes in the protocol of sums over peers' memory, in the place of the functions of ``peers.sums``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def no_wait(flags, part, launch, most_polls, RANK: tl.constexpr, WORLD: tl.constexpr):
    return launch * 0


@triton.jit
def near_tell(flags, part, launch, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    rank = tl.arange(0, LANES)
    reference = tl.load(flags + rank, mask=rank < WORLD, other=0).to(tl.pointer_type(tl.int32))
    word = tl.zeros([LANES], tl.int32) + launch
    tl.atomic_xchg(reference + part * WORLD + RANK, word, mask=rank < WORLD, sem="release", scope="gpu")


@triton.jit
def weak_tell(flags, part, launch, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    rank = tl.arange(0, LANES)
    reference = tl.load(flags + rank, mask=rank < WORLD, other=0).to(tl.pointer_type(tl.int32))
    word = tl.zeros([LANES], tl.int32) + launch
    tl.atomic_xchg(reference + part * WORLD + RANK, word, mask=rank < WORLD, sem="relaxed", scope="sys")


@triton.jit
def standing(launches, part, launch):
    """A counter that never moves."""
