"""Text launches of ragged rows, each (context, tokens), with blocks out of order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launch_inputs import StepInputs

Rows = Sequence[tuple[int, int]]


def ragged_inputs(
    rows: Rows, block_size: int, rng: np.random.Generator, spare: int = 3, shared: bool = False, positions: int = 99
) -> StepInputs:
    """Inputs of one launch: random ids below 50, random positions below ``positions``.

    Args:
        spare: blocks between the reserved ones and the highest id that no row holds.
        shared: rows with a full block of context begin with the same block, which none of them writes.
    """
    held = [-(-(context + tokens) // block_size) for context, tokens in rows]
    free = iter(RESERVED_BLOCKS + rng.permutation(sum(held) + 1 + spare))
    common = next(free)
    blocks = np.zeros((len(rows), max(held)), np.int32)
    for row, (context, _) in enumerate(rows):
        for i in range(held[row]):
            blocks[row, i] = common if shared and i == 0 and context >= block_size else next(free)
    counts = np.array([tokens for _, tokens in rows])
    n = int(counts.sum())
    return StepInputs(
        tokens=rng.integers(0, 50, n, dtype=np.int32),
        from_slot=np.zeros(n, np.int32),
        positions=rng.integers(0, positions, (3, n), dtype=np.int32),
        image_row=np.zeros(n, np.int32),
        out_row=np.arange(1, n + 1, dtype=np.int32),
        row_start=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        context=np.array([context for context, _ in rows], np.int32),
        blocks=blocks,
        slot=np.arange(1, len(rows) + 1, dtype=np.int32),
        adapter=np.zeros(len(rows), np.int32),
    )
