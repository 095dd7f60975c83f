"""Rows copied by number: gather (out[i] = source[rows[i]]) and scatter (target[rows[i]] = values[i])."""

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


def check(table: Tensor, rows: Tensor, part: Tensor) -> None:
    """table [m, width], rows int64 [n], part [n, width]; contiguous, of one dtype."""
    assert table.ndim == 2 and table.is_contiguous() and rows.dtype == torch.int64 and rows.is_contiguous()
    assert part.shape == (len(rows), table.shape[1]), (part.shape, table.shape)
    assert part.is_contiguous() and part.dtype == table.dtype


def gather(source: Tensor, rows: Tensor, out: Tensor) -> None:
    """out[i] = source[rows[i]]: source [m, width], rows int64 [n], out [n, width]."""
    check(source, rows, out)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _gather[(n, triton.cdiv(width, block))](source, rows, out, WIDTH=width, BLOCK=block, num_warps=4)


def scatter(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[rows[i]] = values[i]: target [m, width], rows int64 [n], values [n, width].

    A row that ``rows`` names twice keeps one of the values; only sinks, which nobody reads, are named twice.
    """
    check(target, rows, values)
    n, width = values.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _scatter[(n, triton.cdiv(width, block))](target, rows, values, WIDTH=width, BLOCK=block, num_warps=4)
