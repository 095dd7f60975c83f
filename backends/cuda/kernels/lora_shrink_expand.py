"""Products of LoRA adapters: x A (shrink) and y + x A B (expand), for each token with A and B of its slot.

A program takes a tile of tokens and one slot, and ends at once if no token of the tile has the slot. So grids depend on
shapes alone, weights of slots that no token has are not read, and each row is written by the program of its slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.core.device.launch_tensors import AdapterWeights

FEW, FEW_ROWS, MANY_ROWS = 64, 16, 64
"""Most tokens of a launch in tiles of few rows, and rows of a tile in launches of few tokens and of more."""

STEPS, COLUMNS = {2: 64, 4: 32}, {2: 128, 4: 32}
"""Bytes of a value -> inputs of a step of the first product, and outputs of a program of the second."""

LEAST_RANK = 16
"""Smallest inner size of a product on tensor cores; smaller ranks are padded with zeros."""


@triton.jit
def _shrink(
    x, slot, a, out, n, INPUTS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, own = tl.program_id(1), tl.program_id(2)
    mine = tl.load(slot + row, mask=row < n, other=0) == own + 1
    if tl.max(mine.to(tl.int32), 0) > 0:
        rank = tl.arange(0, WIDE)
        held = rank < RANK
        base = a + (own * PARTS + part).to(tl.int64) * RANK * INPUTS
        of = x + row.to(tl.int64) * INPUTS
        total = tl.zeros([ROWS, WIDE], tl.float32)
        for start in range(0, INPUTS, STEP):
            at = start + tl.arange(0, STEP)
            inside = at < INPUTS
            values = tl.load(of[:, None] + at[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            weights = tl.load(
                base + rank[None, :] * INPUTS + at[:, None], mask=held[None, :] & inside[:, None], other=0.0
            )
            total = tl.dot(values, weights, total, input_precision="ieee")
        to = out + (row.to(tl.int64) * PARTS + part) * RANK
        tl.store(to[:, None] + rank[None, :], total.to(out.dtype.element_ty), mask=mine[:, None] & held[None, :])


@triton.jit
def _expand(
    shrunk, slot, b, y, n, STRIDE: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.program_id(2)
    mine = tl.load(slot + row, mask=row < n, other=0) == own + 1
    if tl.max(mine.to(tl.int32), 0) > 0:
        rank = tl.arange(0, WIDE)
        held, inside = rank < RANK, column < WIDTH
        of = shrunk + (row.to(tl.int64) * PARTS + PART) * RANK
        values = tl.load(of[:, None] + rank[None, :], mask=mine[:, None] & held[None, :], other=0.0)
        base = b + own.to(tl.int64) * RANK * WIDTH
        weights = tl.load(
            base + rank[:, None] * WIDTH + column[None, :], mask=held[:, None] & inside[None, :], other=0.0
        )
        to = y + row.to(tl.int64)[:, None] * STRIDE + START + column[None, :]
        both = mine[:, None] & inside[None, :]
        total = tl.load(to, mask=both, other=0.0).to(tl.float32)
        total += tl.dot(values, weights, input_precision="ieee")
        tl.store(to, total.to(y.dtype.element_ty), mask=both)


def check(y: Tensor, x: Tensor, slot: Tensor, w: AdapterWeights) -> None:
    """Asserts: y [n, out] and x [n, in] of the weights' dtype, slot int32 [n]; all contiguous and of one size."""
    slots, parts, rank, inputs = w.a.shape
    assert slot.dtype == torch.int32 and slot.shape == (len(x),) and slot.is_contiguous()
    assert x.shape[1] == inputs and x.is_contiguous() and y.is_contiguous() and len(y) == len(x)
    assert len(w.b) == parts and y.shape[1] == sum(b.shape[2] for b in w.b), (y.shape, [b.shape for b in w.b])
    assert all(b.shape[:2] == (slots, rank) and b.is_contiguous() for b in w.b) and w.a.is_contiguous()
    assert {t.dtype for t in (x, w.a, *w.b)} == {y.dtype}


def add(y: Tensor, x: Tensor, slot: Tensor, w: AdapterWeights) -> None:
    """Adds to each row of y [n, out] its row of x [n, in] times A and B of its slot, int32 [n] from 1; 0: nothing."""
    check(y, x, slot, w)
    slots, parts, rank, inputs = w.a.shape
    n = len(x)
    if not n:
        return
    size, wide = x.element_size(), max(triton.next_power_of_2(rank), LEAST_RANK)
    rows, columns = FEW_ROWS if n <= FEW or size == 4 else MANY_ROWS, COLUMNS[size]
    shrunk = torch.empty((n, parts, rank), dtype=x.dtype, device=x.device)
    tiles, start = triton.cdiv(n, rows), 0
    _shrink[(tiles, parts, slots)](
        x, slot, w.a, shrunk, n, INPUTS=inputs, PARTS=parts, RANK=rank, WIDE=wide, ROWS=rows, STEP=STEPS[size],
        num_warps=4,
    )  # fmt: skip
    for part, b in enumerate(w.b):
        width = b.shape[2]
        _expand[(tiles, triton.cdiv(width, columns), slots)](
            shrunk, slot, b, y, n, STRIDE=y.shape[1], START=start, WIDTH=width, PARTS=parts, PART=part, RANK=rank,
            WIDE=wide, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        start += width
