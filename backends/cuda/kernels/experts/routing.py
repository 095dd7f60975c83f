"""Routing of tokens to experts, and the order in which a grouped product reads its rows. Nothing is read by the host.

A pair is a token and one of its experts: pair i belongs to token i // top. The pairs of an expert are contiguous, in
their own order, and begin at a tile boundary; the number of tiles follows from the launch's shape alone, and unused
tiles have owner -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.tiles import power

CHUNK = 1024
"""Number of pairs that one program counts."""

ELEMENTS = 4096
"""Number of comparisons of a pair and an expert that a program holds at a time."""


class Routes(NamedTuple):
    """The routing of n tokens."""

    shares: Tensor  # float32 [n, top]
    order: Tensor  # int32 [tiles x M], a pair, or -1 for an unused row of a tile
    owner: Tensor  # int32 [tiles], the tile's expert, or -1 for an unused tile


def tile_capacity(pairs: int, count: int, tile: int) -> int:
    """Returns the maximum number of tiles of ``tile`` pairs for ``count`` experts: each may leave one partly filled."""
    return min(pairs, pairs // tile + count)


def route(scores: Tensor, top: int, normalise: bool, tile: int) -> Routes:
    """Routes scores [n, count], contiguous, in tiles of ``tile`` pairs."""
    assert scores.ndim == 2 and scores.is_contiguous() and 0 < top <= scores.shape[1], (scores.shape, top)
    n, count = scores.shape
    pairs, lanes, device = n * top, max(power(count), 2), scores.device
    tiles, chunks = tile_capacity(pairs, count, tile), -(-pairs // CHUNK)
    found = Routes(
        torch.empty((n, top), dtype=torch.float32, device=device),
        torch.empty(tiles * tile, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
    chosen = torch.empty(pairs, dtype=torch.int32, device=device)
    part = torch.empty((chunks, lanes), dtype=torch.int32, device=device)
    route_kernel[(n,)](
        found.shares, chosen, scores, COUNT=count, LANES=lanes, TOP=top, PICKS=max(power(top), 2),
        NORMALISE=normalise, num_warps=1 if lanes <= 256 else 4,
    )  # fmt: skip
    few = max(ELEMENTS // lanes, 2)
    count_kernel[(chunks,)](part, chosen, pairs, LANES=lanes, FEW=few, CHUNK=CHUNK, num_warps=4)
    place_kernel[(count,)](
        found.order, found.owner, chosen, part, pairs, chunks, tiles, LANES=lanes, CHUNK=CHUNK, M=tile, num_warps=4
    )
    return found


@triton.jit
def route_kernel(
    shares, chosen, scores, COUNT: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, PICKS: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """Selects the experts of one token; of two equal ones the lower number. A NaN affects its shares, not its order."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LANES)
    inside = at < COUNT
    value = tl.load(scores + row * COUNT + at, mask=inside, other=float("-inf")).to(tl.float32)
    each = tl.where(inside, tl.exp(value - tl.max(value, 0)), 0.0)
    share = each / tl.sum(each, 0)
    # Selected experts and lanes beyond the last score lower than every expert that is left.
    left = tl.where(value > -3.0e38, value, -3.0e38)
    left = tl.where(inside, left, float("-inf"))
    pick = tl.arange(0, PICKS)
    found = tl.zeros([PICKS], tl.int32)
    part = tl.zeros([PICKS], tl.float32)
    for i in tl.static_range(TOP):
        best = tl.min(tl.where(left == tl.max(left, 0), at, LANES - 1), 0)
        found = tl.where(pick == i, best, found)
        part = tl.where(pick == i, tl.sum(tl.where(at == best, share, 0.0), 0), part)
        left = tl.where(at == best, float("-inf"), left)
    if NORMALISE:
        part = part / tl.sum(part, 0)
    tl.store(chosen + row * TOP + pick, found, mask=pick < TOP)
    tl.store(shares + row * TOP + pick, part, mask=pick < TOP)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(part, chosen, pairs, LANES: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr):
    """Counts the pairs of each expert in one chunk."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    for start in range(0, CHUNK, FEW):
        pair = chunk * CHUNK + start + tl.arange(0, FEW)
        held = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        total += tl.sum((held[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(part + chunk * LANES + expert, total)


@triton.jit(do_not_specialize=["pairs", "chunks", "tiles"])
def place_kernel(
    order, owner, chosen, part, pairs, chunks, tiles, LANES: tl.constexpr, CHUNK: tl.constexpr, M: tl.constexpr
):
    """Writes the pairs of one expert in their order; the last expert marks unused tiles."""
    expert = tl.program_id(0)
    lane = tl.arange(0, LANES)
    count = tl.zeros([LANES], tl.int32)
    for i in range(0, chunks):
        count += tl.load(part + i * LANES + lane)
    each = (count + M - 1) // M
    first = tl.sum(tl.where(lane < expert, each, 0), 0)
    own = tl.sum(tl.where(lane == expert, count, 0), 0)
    stop = first + (own + M - 1) // M
    for tile in range(first, stop):
        tl.store(owner + tile, expert)
    done = first * M
    for i in range(0, chunks):
        pair = i * CHUNK + tl.arange(0, CHUNK)
        mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + done + tl.cumsum(mine, 0) - mine, pair, mask=mine > 0)
        done += tl.sum(mine, 0)
    spare = done + tl.arange(0, M)
    tl.store(order + spare, tl.full([M], -1, tl.int32), mask=spare < stop * M)
    if expert == tl.num_programs(0) - 1:
        for tile in range(stop, tiles):
            tl.store(owner + tile, -1)
