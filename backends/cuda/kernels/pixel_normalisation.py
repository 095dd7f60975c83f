"""Converts uint8 patches to the patch GEMM's input: pixel * scale + shift per feature, in float32 with one rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 16, 256
"""Size of a tile; slots come in windows of 64, so rows need no mask."""


@triton.jit
def _patches(
    pixels, scale, shift, out, READ: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < WIDTH
    pixel = tl.load(pixels + row * READ + at, mask=at < READ, other=0).to(tl.float32)
    value = pixel * tl.load(scale + at, mask=inside, other=0.0) + tl.load(shift + at, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def check(pixels: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Asserts: pixels uint8 [slots, features], scale and shift float32 [at least as many]; contiguous, slots a multiple
    of ROWS.
    """
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous() and pixels.shape[0] % ROWS == 0, pixels.shape
    for factor in (scale, shift):
        assert factor.dtype == torch.float32 and factor.is_contiguous() and factor.shape == scale.shape
    assert scale.dim() == 1 and scale.numel() >= pixels.shape[1], (scale.shape, pixels.shape)


def launch(pixels: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """Writes out [slots, width] from pixels uint8 [slots, features], scale and shift float32 [width].

    Features beyond those of ``pixels`` are written as 0.
    """
    check(pixels, scale, shift)
    slots, width = out.shape
    _patches[(slots // ROWS, triton.cdiv(width, BLOCK))](
        pixels, scale, shift, out, READ=pixels.shape[1], WIDTH=width, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
    )
