"""Grouped products of experts: each program multiplies one tile of pairs by some columns of their expert.

Three kernels: gate and up, with the activation, down times the weight of the pair, and the sum of a token's
pairs from its best expert to its least. A row's bits follow from its token and from the class of tiles, which follows
from the launch's shape; with ``alike`` there is one class.

Routing of tokens to experts, and the order in which a grouped product reads its rows. Nothing is read by the host.

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

from trencadis.backends.cuda.kernels import quantised_fused_moe, tile_sizes
from trencadis.backends.cuda.kernels.activation import KINDS, adjust_up, apply_activation
from trencadis.backends.cuda.kernels.quantised_fused_moe import PairTiles, order_programs, tile_places
from trencadis.backends.cuda.kernels.tile_sizes import power
from trencadis.backends.cuda.weights.stacked_experts import ExpertMatrix, StackedCodes, StackedExperts

CHUNK = 1024
"""Number of pairs that one program counts."""

ELEMENTS = 4096
"""Number of comparisons of a pair and an expert that a program holds at a time."""

COMPARED = 128
"""Maximum number of pairs that are placed by comparing each with each."""


class Routes(NamedTuple):
    """The routing of n tokens."""

    shares: Tensor  # float32 [n, top]
    order: Tensor  # int32 [tiles x M], a pair, or -1 for an unused row of a tile
    owner: Tensor  # int32 [tiles], the tile's expert, or -1 for an unused tile


def tile_capacity(pairs: int, count: int, tile: int) -> int:
    """Returns the maximum number of tiles of ``tile`` pairs for ``count`` experts: each may leave one partly filled."""
    return min(pairs, pairs // tile + count)


def route_tokens(scores: Tensor, top: int, normalise: bool, tile: int, alike: bool = False) -> Routes:
    """Routes scores [n, count], contiguous, in tiles of ``tile`` pairs; few tokens in one launch unless ``alike``."""
    assert scores.ndim == 2 and scores.is_contiguous() and 0 < top <= scores.shape[1], (scores.shape, top)
    n, count = scores.shape
    pairs, lanes, device = n * top, max(power(count), 2), scores.device
    tiles, chunks = tile_capacity(pairs, count, tile), -(-pairs // CHUNK)
    found = Routes(
        torch.empty((n, top), dtype=torch.float32, device=device),
        torch.empty(tiles * tile, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
    rows, picks = power(n), max(power(top), 2)
    if n <= tile and rows * picks <= COMPARED and rows * lanes <= 4 * ELEMENTS and not alike:
        route_few_kernel[(1,)](
            found.shares, found.order, found.owner, scores, n, tiles, COUNT=count, LANES=lanes, TOP=top, PICKS=picks,
            NORMALISE=normalise, ROWS=rows, TILES=power(tiles), M=tile,
            num_warps=4 if rows * lanes <= 1024 else 16,
        )  # fmt: skip
        return found
    chosen = torch.empty(pairs, dtype=torch.int32, device=device)
    part = torch.empty((chunks, lanes), dtype=torch.int32, device=device)
    route_kernel[(n,)](
        found.shares, chosen, scores, COUNT=count, LANES=lanes, TOP=top, PICKS=picks,
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
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    pick = tl.arange(0, PICKS)
    found, part = choose_experts(scores, row, row >= 0, COUNT, LANES, TOP, PICKS, NORMALISE, 1)
    address = (row * TOP)[:, None] + pick[None, :]
    tl.store(chosen + address, found, mask=(pick < TOP)[None, :])
    tl.store(shares + address, part, mask=(pick < TOP)[None, :])


@triton.jit
def choose_experts(
    scores, row, here, COUNT: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, PICKS: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns (int32 experts, float32 shares), [ROWS, PICKS] each, of the tokens ``row`` [ROWS]."""
    at = tl.arange(0, LANES)[None, :]
    inside = at < COUNT
    value = tl.load(scores + row[:, None] * COUNT + at, mask=here[:, None] & inside, other=float("-inf"))
    value = tl.where(here[:, None] | (at > 0), value.to(tl.float32), 0.0)
    each = tl.where(inside, tl.exp(value - tl.max(value, 1)[:, None]), 0.0)
    share = each / tl.sum(each, 1)[:, None]
    # Selected experts and lanes beyond the last score lower than every expert that is left.
    left = tl.where(value > -3.0e38, value, -3.0e38)
    left = tl.where(inside, left, float("-inf"))
    pick = tl.arange(0, PICKS)[None, :]
    found = tl.zeros([ROWS, PICKS], tl.int32)
    part = tl.zeros([ROWS, PICKS], tl.float32)
    for i in tl.static_range(TOP):
        best = tl.min(tl.where(left == tl.max(left, 1)[:, None], at, LANES - 1), 1)[:, None]
        found = tl.where(pick == i, best, found)
        part = tl.where(pick == i, tl.sum(tl.where(at == best, share, 0.0), 1)[:, None], part)
        left = tl.where(at == best, float("-inf"), left)
    if NORMALISE:
        part = part / tl.sum(part, 1)[:, None]
    return found, part


@triton.jit(do_not_specialize=["rows", "tiles"])
def route_few_kernel(
    shares, order, owner, scores, rows, tiles, COUNT: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr,
    PICKS: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Routes at most M tokens, so that no expert has more than one tile, as the three kernels for more do."""
    row = tl.arange(0, ROWS)
    pick = tl.arange(0, PICKS)[None, :]
    found, part = choose_experts(scores, row, row < rows, COUNT, LANES, TOP, PICKS, NORMALISE, ROWS)
    there = (row < rows)[:, None] & (pick < TOP)
    tl.store(shares + (row * TOP)[:, None] + pick, part, mask=there)
    slot = tl.arange(0, TILES)
    tl.store(owner + slot, tl.full([TILES], -1, tl.int32), mask=slot < tiles)
    lane = slot[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(order + lane, tl.full([TILES, M], -1, tl.int32), mask=(slot < tiles)[:, None])
    tl.debug_barrier()  # all threads have marked their places as unused before pairs take some
    expert = tl.reshape(tl.where(there, found, -1), [ROWS * PICKS])
    pair = tl.reshape((row * TOP)[:, None] + pick, [ROWS * PICKS])
    index = tl.arange(0, ROWS * PICKS)
    earlier = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
    place = tl.sum(earlier.to(tl.int32), 1)
    leads = tl.where((place == 0) & (expert >= 0), expert, COUNT)  # an expert where its first pair is
    tile = tl.sum((leads[None, :] < expert[:, None]).to(tl.int32), 1)
    tl.store(order + tile * M + place, pair, mask=expert >= 0)
    tl.store(owner + tile, expert, mask=leads < COUNT)


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


STEP = {16: 64, 32: 32}
"""Bits of a value -> columns of a step."""

FEW, MANY = 16, 64
"""Pairs per expert on average up to which tiles are small, and above which they are those of prompts."""

BLOCK = 1024


def run(
    x: Tensor, scores: Tensor, w: StackedExperts, top: int, normalise: bool, kind: str, alike: bool = False
) -> Tensor:
    """Implements ``core.device.backend.Ops.experts``; ``alike``: uses the same tiles in every launch."""
    check(x, scores, w, kind)
    n, hidden = x.shape
    out = torch.empty_like(x)
    if not n:
        return out
    length = "many" if alike else length_class(n * top, w.count)
    tile = tile_of(x, w.gate_up, length, w.gated)
    routes = route_tokens(scores, top, normalise, tile.m, alike)
    between = _up(x, w, routes, top, kind, tile)
    part = _down(between, w, routes, tile_of(x, w.down, length, False)._replace(m=tile.m))
    experts_sum_kernel[(n, -(-hidden // BLOCK))](out, part, hidden, TOP=top, BLOCK=BLOCK, num_warps=4)
    return out


def check(x: Tensor, scores: Tensor, w: StackedExperts, kind: str) -> None:
    """Asserts: x [n, hidden] and scores [n, count], contiguous, and weights that fit them: codes, or of x's dtype."""
    assert kind in KINDS, kind
    assert x.ndim == 2 and x.is_contiguous() and scores.shape == (x.shape[0], w.count), (x.shape, scores.shape)
    assert w.gated or w.gate_up_bias is None, "experts without gates have no biases"
    hidden = x.shape[1]
    for part, shape in ((w.gate_up, (w.count, (1 + w.gated) * w.inner, hidden)), (w.down, (w.count, hidden, w.inner))):
        if isinstance(part, StackedCodes):
            quantised_fused_moe.check(part, shape)
        else:
            assert part.shape == shape and part.is_contiguous() and part.dtype == x.dtype, (part.shape, part.dtype)


def length_class(pairs: int, count: int) -> str:
    """Returns the class of tiles of a launch of ``pairs`` pairs of ``count`` experts."""
    return "few" if pairs <= FEW * count else "many" if pairs <= MANY * count else "prompt"


def tile_of(x: Tensor, w: ExpertMatrix, length: str, gated: bool) -> tile_sizes.Tile:
    """Returns the tile; m: pairs, n: columns, of gates and of ups alike if ``gated``.

    The table's ``group`` is 1 for such, its ``head`` has no meaning here.
    """
    if isinstance(w, StackedCodes):
        return quantised_fused_moe.tile_of(x, w, length, gated)
    found, arch = tile_sizes.FORCED.get("experts"), tile_sizes.arch_of(x.device)
    return found or tile_sizes.find("experts", arch, x.dtype.itemsize * 8, 0, int(gated), length)


def _sizes(x: Tensor, tile: tile_sizes.Tile) -> dict[str, int]:
    return {
        "M": tile.m, "N": tile.n, "K": STEP[x.dtype.itemsize * 8], "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _up(x: Tensor, w: StackedExperts, r: Routes, top: int, kind: str, tile: tile_sizes.Tile) -> Tensor:
    if isinstance(w.gate_up, StackedCodes):
        pairs = PairTiles(r.order, r.owner, top)
        return quantised_fused_moe.multiply_up(x, w.gate_up, w.gate_up_bias, pairs, w.inner, KINDS[kind], tile)
    out = torch.empty((len(x) * top, w.inner), dtype=x.dtype, device=x.device)
    bias = w.gate_up if w.gate_up_bias is None else w.gate_up_bias
    experts_kernel[(r.owner.shape[0] * -(-w.inner // tile.n),)](
        out, x, w.gate_up, bias, r.order, r.owner, x.shape[1], w.inner, TOP=top, KIND=KINDS[kind],
        BIASED=w.gate_up_bias is not None, GATED=w.gated, **_sizes(x, tile),
    )  # fmt: skip
    return out


def _down(x: Tensor, w: StackedExperts, r: Routes, tile: tile_sizes.Tile) -> Tensor:
    if isinstance(w.down, StackedCodes):
        pairs = PairTiles(r.order, r.owner, 1)
        return quantised_fused_moe.multiply_down(x, w.down, w.down_bias, pairs, r.shares, tile)
    hidden = w.down.shape[1]
    out = torch.empty((len(x), hidden), dtype=x.dtype, device=x.device)
    bias = w.down if w.down_bias is None else w.down_bias
    experts_down_kernel[(r.owner.shape[0] * -(-hidden // tile.n),)](
        out, x, w.down, bias, r.shares, r.order, r.owner, hidden, w.inner, BIASED=w.down_bias is not None,
        **_sizes(x, tile),
    )  # fmt: skip
    return out


@triton.jit
def experts_kernel(
    out, x, weight, bias, order, owner, hidden, inner,
    TOP: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, block = order_programs(tl.cdiv(inner, N))
    expert = tl.load(owner + tile)
    if expert >= 0:
        pair, column = tile_places(order, tile, block, M, N)
        here, there = pair >= 0, column < inner
        row = x + (tl.where(here, pair, 0) // TOP) * hidden
        gates = weight + (expert.to(tl.int64) * (2 if GATED else 1) * inner + column) * hidden
        gate = tl.zeros([M, N], tl.float32)
        if GATED:
            ups = gates + inner.to(tl.int64) * hidden
            up = tl.zeros([M, N], tl.float32)
        for start in range(0, hidden, K):
            at = start + tl.arange(0, K)
            inside = at < hidden
            values = tl.load(row[:, None] + at[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            inside_both = there[None, :] & inside[:, None]
            held = tl.load(gates[None, :] + at[:, None], mask=inside_both, other=0.0)
            gate = tl.dot(values, held, gate, input_precision="ieee")
            if GATED:
                held = tl.load(ups[None, :] + at[:, None], mask=inside_both, other=0.0)
                up = tl.dot(values, held, up, input_precision="ieee")
        if BIASED:
            own = bias + expert.to(tl.int64) * 2 * inner + column
            gate += tl.load(own, mask=there, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + inner, mask=there, other=0.0).to(tl.float32)[None, :]
        made = apply_activation(gate, KIND)
        if GATED:
            made *= adjust_up(up, KIND)
        address = out + pair[:, None] * inner + column[None, :]
        tl.store(address, made.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit
def experts_down_kernel(
    out, x, weight, bias, shares, order, owner, hidden, inner,
    BIASED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, block = order_programs(tl.cdiv(hidden, N))
    expert = tl.load(owner + tile)
    if expert >= 0:
        pair, column = tile_places(order, tile, block, M, N)
        here, there = pair >= 0, column < hidden
        row = x + tl.where(here, pair, 0) * inner
        downs = weight + (expert.to(tl.int64) * hidden + column) * inner
        made = tl.zeros([M, N], tl.float32)
        for start in range(0, inner, K):
            at = start + tl.arange(0, K)
            inside = at < inner
            values = tl.load(row[:, None] + at[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            held = tl.load(downs[None, :] + at[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            made = tl.dot(values, held, made, input_precision="ieee")
        if BIASED:
            made += tl.load(bias + expert.to(tl.int64) * hidden + column, mask=there, other=0.0).to(tl.float32)[None, :]
        made *= tl.load(shares + pair, mask=here, other=0.0)[:, None]
        address = out + pair[:, None] * hidden + column[None, :]
        tl.store(address, made.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit
def experts_sum_kernel(out, part, hidden, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP):
        total += tl.load(part + (row * TOP + i) * hidden + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=there)
