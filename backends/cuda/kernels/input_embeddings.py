"""Inputs of the first layers of decoder and vision tower.

A token's embedding is the row of an id, of the id last sampled in a slot, or of an image in the arena. The patch GEMM
reads pixel * scale + shift per feature, from uint8, in float32 with one rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _embed(tokens, from_slot, last, image_row, arena, table, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    image = tl.load(image_row + token).to(tl.int64)
    if image > 0:
        value = tl.load(arena + image * WIDTH + at, mask=inside, other=0.0)
    else:
        slot = tl.load(from_slot + token)
        sampled = tl.load(last + slot)
        name = tl.where(slot > 0, sampled, tl.load(tokens + token)).to(tl.int64)
        value = tl.load(table + name * WIDTH + at, mask=inside, other=0.0)
    tl.store(out + token * WIDTH + at, value, mask=inside)


def check_tokens(
    tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
) -> None:
    """Asserts: int32 [n] each, ``last`` int32 [slots + 1]; arena and table of one width and dtype, contiguous."""
    for ints in (tokens, from_slot, last, image_row):
        assert ints.dtype == torch.int32 and ints.ndim == 1 and ints.is_contiguous()
    assert tokens.shape == from_slot.shape == image_row.shape
    assert arena.is_contiguous() and table.is_contiguous() and arena.dtype == table.dtype
    assert arena.shape[1:] == table.shape[1:], (arena.shape, table.shape)


def embed_tokens(
    tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor, out: Tensor
) -> None:
    """Writes the embeddings of n tokens to out [n, width].

    Args:
        tokens, from_slot, image_row: int32 [n].
        last: int32 [slots + 1].
        arena: [image rows, width].
        table: [vocabulary, width].
    """
    check_tokens(tokens, from_slot, last, image_row, arena, table)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _embed[(n, triton.cdiv(width, block))](
            tokens, from_slot, last, image_row, arena, table, out, WIDTH=width, BLOCK=block, num_warps=4
        )


PATCH_ROWS, PATCH_BLOCK = 16, 256
"""Size of a tile of patches; slots come in windows of 64, so rows need no mask."""


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


def check_pixels(pixels: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Asserts: pixels uint8 [slots, features], scale and shift float32 [at least as many]; contiguous, slots a multiple
    of PATCH_ROWS.
    """
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous() and pixels.shape[0] % PATCH_ROWS == 0, pixels.shape
    for factor in (scale, shift):
        assert factor.dtype == torch.float32 and factor.is_contiguous() and factor.shape == scale.shape
    assert scale.dim() == 1 and scale.numel() >= pixels.shape[1], (scale.shape, pixels.shape)


def normalise_pixels(pixels: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """Writes out [slots, width], the patch GEMM's input, from pixels uint8 [slots, features], scale and shift float32
    [width].

    Features beyond those of ``pixels`` are written as 0.
    """
    check_pixels(pixels, scale, shift)
    slots, width = out.shape
    _patches[(slots // PATCH_ROWS, triton.cdiv(width, PATCH_BLOCK))](
        pixels, scale, shift, out, READ=pixels.shape[1], WIDTH=width, ROWS=PATCH_ROWS, BLOCK=PATCH_BLOCK, num_warps=4
    )
