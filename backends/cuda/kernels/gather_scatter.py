"""Kernels over rows by number: gather (out[i] = source[rows[i]]), scatter (target[rows[i]] = values[i]), and sums of a
few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gather(source, rows, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    to = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = tl.load(rows + to)
    tl.store(out + to * WIDTH + at, tl.load(source + row * WIDTH + at, mask=inside), mask=inside)


@triton.jit
def _scatter(target, rows, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    of = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = tl.load(rows + of)
    tl.store(target + row * WIDTH + at, tl.load(values + of * WIDTH + at, mask=inside), mask=inside)


@triton.jit
def _mix(table, near, share, out, WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        row = tl.load(near + slot * COUNT + i).to(tl.int64)
        value = tl.load(table + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(share + slot * COUNT + i)
    tl.store(out + slot * WIDTH + at, total.to(out.dtype.element_ty), mask=inside)


def check(table: Tensor, rows: Tensor, part: Tensor) -> None:
    """Asserts: table [m, width], rows int64 [n], part [n, width]; contiguous, of one dtype."""
    assert table.ndim == 2 and table.is_contiguous() and rows.dtype == torch.int64 and rows.is_contiguous()
    assert part.shape == (len(rows), table.shape[1]), (part.shape, table.shape)
    assert part.is_contiguous() and part.dtype == table.dtype


def gather(source: Tensor, rows: Tensor, out: Tensor) -> None:
    """Computes out[i] = source[rows[i]]: source [m, width], rows int64 [n], out [n, width]."""
    check(source, rows, out)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _gather[(n, triton.cdiv(width, block))](source, rows, out, WIDTH=width, BLOCK=block, num_warps=4)


def scatter(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """Computes target[rows[i]] = values[i]: target [m, width], rows int64 [n], values [n, width].

    A row that ``rows`` names twice keeps one of the values; only sink rows, which are never read, are named twice.
    """
    check(target, rows, values)
    n, width = values.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _scatter[(n, triton.cdiv(width, block))](target, rows, values, WIDTH=width, BLOCK=block, num_warps=4)


def check_mix(table: Tensor, near: Tensor, share: Tensor, out: Tensor) -> None:
    """Asserts: table [rows, width], near int32 [slots, count], share float32 of that shape, out [slots, width];
    contiguous.
    """
    assert table.ndim == 2 and table.is_contiguous() and out.is_contiguous() and out.dtype == table.dtype
    assert near.dtype == torch.int32 and share.dtype == torch.float32 and near.ndim == 2 and near.shape == share.shape
    assert near.is_contiguous() and share.is_contiguous()
    assert out.shape == (near.shape[0], table.shape[1]), (out.shape, near.shape, table.shape)


def mix(table: Tensor, near: Tensor, share: Tensor, out: Tensor) -> None:
    """Writes out [slots, width]: sums of rows of table [rows, width] by near int32 and share float32 [slots, count]."""
    check_mix(table, near, share, out)
    slots, width = out.shape
    if slots:
        block = min(triton.next_power_of_2(width), BLOCK)
        _mix[(slots, triton.cdiv(width, block))](
            table, near, share, out, WIDTH=width, COUNT=near.shape[1], BLOCK=block, num_warps=4
        )
