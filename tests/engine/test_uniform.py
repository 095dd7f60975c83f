"""The host's random numbers: one for each (seed, choice, index), whatever was asked before."""

from __future__ import annotations

import random

import numpy as np

from trencadis.core.scheduling.sequence import AHEAD, uniform

EDGES = (0, 1, AHEAD - 1, AHEAD, AHEAD + 1, 5 * AHEAD - 1, 1 << 20, (1 << 33) + 7)


def philox(seed: int, choice: int, index: int) -> float:
    """The definition: the first word of Philox at one counter."""
    key = np.array([seed % 2**64, choice], np.uint64)
    return ((int(np.random.Philox(key=key, counter=[index, 0, 0, 0]).random_raw()) >> 41) + 0.5) / 2**23


def test_numbers_are_philox_at_their_counter() -> None:
    rng = random.Random(3)
    requested = [(s, c, i) for s in (0, 7, 2**63 - 1, -1, -(2**63)) for c in (0, 3) for i in EDGES]
    rng.shuffle(requested)
    for seed, choice, index in requested:
        found = uniform(seed, choice, index)
        assert found == philox(seed, choice, index) and 0 < found < 1 and float(np.float32(found)) == found


def test_neighbouring_seeds_draw_other_numbers() -> None:
    for first in (-9, -1, 0, 2**62, -(2**63)):
        assert len({uniform(first + i, 0, 0) for i in range(9)}) == 9, first
