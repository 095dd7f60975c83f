"""Input embeddings: the row of an id, of the id last sampled in a slot, or of an image in the arena."""

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


def check(tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor) -> None:
    """Asserts: int32 [n] each, ``last`` int32 [slots + 1]; arena and table of one width and dtype, contiguous."""
    for ints in (tokens, from_slot, last, image_row):
        assert ints.dtype == torch.int32 and ints.ndim == 1 and ints.is_contiguous()
    assert tokens.shape == from_slot.shape == image_row.shape
    assert arena.is_contiguous() and table.is_contiguous() and arena.dtype == table.dtype
    assert arena.shape[1:] == table.shape[1:], (arena.shape, table.shape)


def launch(
    tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor, out: Tensor
) -> None:
    """Writes the embeddings of n tokens to out [n, width].

    Args:
        tokens, from_slot, image_row: int32 [n].
        last: int32 [slots + 1].
        arena: [image rows, width].
        table: [vocabulary, width].
    """
    check(tokens, from_slot, last, image_row, arena, table)
    n, width = out.shape
    if n:
        block = min(triton.next_power_of_2(width), BLOCK)
        _embed[(n, triton.cdiv(width, block))](
            tokens, from_slot, last, image_row, arena, table, out, WIDTH=width, BLOCK=block, num_warps=4
        )
