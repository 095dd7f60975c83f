"""Two-shot all-reduce: each rank adds one share of every part of the message, then all ranks collect the shares.

A rank reads every message once in one step (``one_shot_reduce``); here it reads one share of each and then one sum of
each, which is 2 / ranks of the bytes, for one more signal of every rank. A program has as many blocks of the message as
there are ranks, one of them its own; it waits only for the same program of every rank. The two steps use the protocol
of
``one_shot_reduce`` twice: messages and sums are its two halves, and before a rank writes a half again, it has seen
every rank's signal of the other one, sent after its last read. The position of a program's blocks does not depend on
the
length of a message, so launches of any lengths may follow each other. One rank adds a block, so all have its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.peers.one_shot_reduce import (
    BLOCK,
    PeerBuffers,
    advance,
    launch,
    signal_peers,
    wait_for_all,
)

MOST = 4 << 20
"""Bytes of the longest message; beyond it NCCL is as fast (github.com/vllm-project/vllm/pull/24532)."""

LEAST_RANKS = 3
"""Fewest ranks; with two, both ways read the same bytes."""

ONE_STEP = {2: 512 << 10, 4: 512 << 10, 8: 256 << 10}
"""Ranks, at most -> bytes up to which one step is used (vLLM's csrc/custom_all_reduce.cuh takes one stage below)."""

tell_sums, wait_for_sums = signal_peers, wait_for_all


def one_step_bytes(world: int) -> int:
    """Returns up to how many bytes ``world`` ranks sum in one step; 0: so many ranks do not sum over peer memory."""
    return next((most for ranks, most in ONE_STEP.items() if world <= ranks), 0)


def steps(nbytes: int, world: int) -> int:
    """Returns the steps of a sum of ``nbytes`` over ``world`` ranks: 1, 2, or 0 for NCCL."""
    one = one_step_bytes(world)
    if nbytes <= one:
        return 1
    return 2 if world >= LEAST_RANKS and one and nbytes <= MOST else 0


def programs(count: int, world: int) -> int:
    """Returns the number of programs for a message of ``count`` values."""
    return -(-count // (BLOCK * world))


def can_reduce(x: Tensor, buffers: PeerBuffers) -> bool:
    """Returns True if x can be summed: it is contiguous and fits the buffers."""
    return (
        x.is_contiguous()
        and 0 < x.nbytes <= buffers.half
        and programs(x.numel(), buffers.world) <= len(buffers.launches)
    )


def all_reduce(x: Tensor, buffers: PeerBuffers, residual: Tensor | None = None, polls: int | None = None) -> Tensor:
    """Returns the sum of x over ranks, plus ``residual``, shaped like x, in float32 with one rounding.

    Every rank must launch the same messages in the same order.

    Args:
        buffers: used for two-shot sums only.
        polls: of each rank's flag before a program gives up; None: ``one_shot_reduce.SPINS``.
    """
    assert can_reduce(x, buffers)
    count = programs(x.numel(), buffers.world)
    return launch(peer_shares_kernel, count, x, buffers, residual, polls)


@triton.jit(do_not_specialize=["most_polls"])
def peer_shares_kernel(
    out, x, residual, messages, flags, launches, count, most_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
    LANES: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    word = tl.load(launches + part) + 1
    lane = tl.arange(0, BLOCK)
    own = tl.multiple_of(tl.load(messages + RANK).to(tl.pointer_type(out.dtype.element_ty)), 16)
    for share in tl.static_range(WORLD):
        at = (part * WORLD + share) * BLOCK + lane
        inside = at < count
        tl.store(own + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all threads have stored their part before one signals
    signal_peers(flags, part, word, RANK, WORLD, LANES)
    late = wait_for_all(flags, part, word, most_polls, RANK, WORLD)
    tl.debug_barrier()
    at = (part * WORLD + RANK) * BLOCK + lane
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        peer = tl.multiple_of(tl.load(messages + rank).to(tl.pointer_type(out.dtype.element_ty)), 16)
        total += tl.load(peer + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if ADD:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(late > 0, float("nan"), total)
    offset = sums_from(HALF) + part * BLOCK + lane
    tl.store(own + offset, total.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    tell_sums(flags, part, word + 1, RANK, WORLD, LANES)
    late = wait_for_sums(flags, part, word + 1, most_polls, RANK, WORLD)
    tl.debug_barrier()
    for rank in tl.static_range(WORLD):
        at = (part * WORLD + rank) * BLOCK + lane
        inside = at < count
        peer = tl.multiple_of(tl.load(messages + rank).to(tl.pointer_type(out.dtype.element_ty)), 16)
        sum_of = tl.load(peer + offset, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        sum_of = tl.where(late > 0, float("nan"), sum_of)
        tl.store(out + at, sum_of.to(out.dtype.element_ty), mask=inside)
    advance(launches, part, word + 1)


@triton.jit
def sums_from(HALF: tl.constexpr):
    """Returns the offset of the sums, which follow the messages."""
    return HALF
