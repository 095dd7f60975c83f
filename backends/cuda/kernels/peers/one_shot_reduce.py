"""One-shot all-reduce: each rank writes its message to memory that all can read, signals, and adds all messages itself.

A program has a part of the message, flags for it and a counter of its launches; it waits only for the same program of
every rank. The counter is in memory of the card, so a captured launch may be replayed. Messages alternate between two
halves of the buffer: before a rank writes a half again, it has seen every rank's signal of the launch in between,
which that rank sent after its last read of the half. Every rank adds in the same order, so all have the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4

MOST = 512 << 10
"""Bytes of the longest message. On four H100 a custom one-stage sum of 0.5 MB takes 10 us and NCCL's 21; from 4 MB on
NCCL is not behind (github.com/vllm-project/vllm/pull/24532)."""

SPINS = 1 << 26
"""Polls of a rank before a program gives up, half a minute or more; its part of the sum is then NaN."""


class PeerBuffers(NamedTuple):
    """Buffers and counters of a rank's launches."""

    rank: int
    world: int
    messages: Tensor  # int64 [world] addresses of the ranks' buffers, each of two halves
    flags: Tensor  # int64 [world] addresses of the ranks' flags, int32 [programs, world]
    launches: Tensor  # int32 [programs], private to this rank
    half: int  # bytes


def programs(count: int) -> int:
    """Returns the number of programs for a message of ``count`` values."""
    return -(-count // BLOCK)


def can_reduce(x: Tensor, buffers: PeerBuffers) -> bool:
    """Returns True if x can be summed: it is contiguous and fits the buffers."""
    return x.is_contiguous() and 0 < x.nbytes <= buffers.half and programs(x.numel()) <= len(buffers.launches)


def all_reduce(x: Tensor, buffers: PeerBuffers, residual: Tensor | None = None, polls: int | None = None) -> Tensor:
    """Returns the sum of x over ranks, plus ``residual``, shaped like x, in float32 with one rounding.

    Every rank must launch the same messages in the same order.

    Args:
        polls: of each rank's flag before a program gives up; None: ``SPINS``.
    """
    assert can_reduce(x, buffers)
    return launch(peer_sum_kernel, programs(x.numel()), x, buffers, residual, polls)


def launch(
    kernel: Any, count: int, x: Tensor, buffers: PeerBuffers, residual: Tensor | None, polls: int | None
) -> Tensor:
    """Launches ``kernel`` with ``count`` programs that sum messages like x; returns the result, shaped like x."""
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    out = torch.empty_like(x)
    kernel[(count,)](
        out, x, x if residual is None else residual, buffers.messages, buffers.flags, buffers.launches, x.numel(),
        SPINS if polls is None else polls, RANK=buffers.rank, WORLD=buffers.world,
        LANES=triton.next_power_of_2(buffers.world), HALF=buffers.half // x.itemsize, ADD=residual is not None,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["most_polls"])
def peer_sum_kernel(
    out, x, residual, messages, flags, launches, count, most_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
    LANES: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    launch = tl.load(launches + part) + 1
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    offset = half_of(launch, HALF) + at
    own = tl.multiple_of(tl.load(messages + RANK).to(tl.pointer_type(out.dtype.element_ty)), 16)
    tl.store(own + offset, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all threads have stored their part before one signals
    signal_peers(flags, part, launch, RANK, WORLD, LANES)
    late = wait_for_all(flags, part, launch, most_polls, RANK, WORLD)
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        peer = tl.multiple_of(tl.load(messages + rank).to(tl.pointer_type(out.dtype.element_ty)), 16)
        total += tl.load(peer + offset, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if ADD:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(late > 0, float("nan"), total)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    advance(launches, part, launch)


@triton.jit
def half_of(launch, HALF: tl.constexpr):
    """Returns the offset of the half of the buffer that a launch uses."""
    return launch % 2 * HALF


@triton.jit
def signal_peers(flags, part, launch, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Signals every rank that this rank's part of the message is written."""
    rank = tl.arange(0, LANES)
    peer = tl.load(flags + rank, mask=rank < WORLD, other=0).to(tl.pointer_type(tl.int32))
    word = tl.zeros([LANES], tl.int32) + launch
    tl.atomic_xchg(peer + part * WORLD + RANK, word, mask=rank < WORLD, sem="release", scope="sys")


@triton.jit
def wait_for_all(flags, part, launch, most_polls, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Waits for the parts of all ranks; returns 1 if a rank did not signal in time."""
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + part * WORLD
    late = launch * 0
    for rank in tl.static_range(WORLD):
        polls = launch * 0
        arrived = tl.atomic_add(own + rank, 0, sem="acquire", scope="sys")
        while (arrived < launch) & (polls < most_polls):
            arrived = tl.atomic_add(own + rank, 0, sem="acquire", scope="sys")
            polls += 1
        late = tl.where(arrived < launch, 1, late)
    return late


@triton.jit
def advance(launches, part, launch):
    """Stores ``launch`` as the number of this program's last launch."""
    tl.store(launches + part, launch)
