"""Where keys lie in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(table, start, stop, N: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [N]: cache slots of the keys start, start + 1 ...; start is a multiple of N.

    Where a block holds whole tiles, one id is read and the slots are consecutive; else ids up to ``stop`` are read,
    one a key, and slots behind it lie in the ZERO block.
    """
    lane = tl.arange(0, N)
    if BLOCK % N == 0:
        block = tl.load(table + start // BLOCK).to(tl.int64)
        return block * BLOCK + start % BLOCK + lane
    else:
        key = start + lane
        block = tl.load(table + key // BLOCK, mask=key < stop, other=0).to(tl.int64)
        return block * BLOCK + key % BLOCK
