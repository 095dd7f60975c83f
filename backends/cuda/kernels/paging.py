"""Where keys lie in the paged cache.

The ids of a tile's blocks are read one tile ahead and carried through the loop: were they read where they are used,
the compiler would spend half of its pipeline stages on them, and keys would no longer be loaded during a product.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ids_of(table, start, stop, N: tl.constexpr, BLOCK: tl.constexpr):
    """Block ids of the keys start, start + 1 ... (start is a multiple of N), those at ``stop`` or behind it ZERO.

    One id where a block holds whole tiles, else int32 [N], one a key.
    """
    if BLOCK % N == 0:
        return tl.load(table + start // BLOCK, mask=start < stop, other=0)
    else:
        key = start + tl.arange(0, N)
        return tl.load(table + key // BLOCK, mask=key < stop, other=0)


@triton.jit
def slots_of(ids, start, N: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [N]: cache slots of the keys start, start + 1 ..., whose block ids are ``ids``."""
    return ids.to(tl.int64) * BLOCK + (start + tl.arange(0, N)) % BLOCK
