"""The one random number of a sampled token, drawn on the host. Torch-free.

Philox 4x64 (Salmon et al., SC'11) with key = (seed, choice) and counter = index of the output token. There is no state
that a preemption could lose, and every rank and device gets the same number.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trencadis.core.step import Float32

_MASK = (1 << 64) - 1
AHEAD = 128
"""Numbers drawn at a time: making a generator takes as long as some hundred draws."""

KEPT = 384
"""Batches of numbers that are cached; a sequence whose batch was dropped draws it again."""


def uniform(seed: int, choice: int, index: int) -> float:
    """A float32-exact number in (0, 1): 23 random bits, centred in their interval."""
    return float(numbers(seed, choice, index // AHEAD)[index % AHEAD])


def numbers(seed: int, choice: int, part: int) -> Float32:
    """float32 [AHEAD], not to be changed: the numbers of the output tokens from ``part * AHEAD`` on."""
    return _numbers(seed & _MASK, choice & _MASK, part)


@lru_cache(maxsize=KEPT)
def _numbers(seed: int, choice: int, part: int) -> Float32:
    """AHEAD numbers, each from the first of the four words of its counter."""
    key = np.array([seed, choice], np.uint64)  # numpy makes floats of such a list where a seed is negative
    words = np.random.Philox(key=key, counter=[part * AHEAD, 0, 0, 0]).random_raw(4 * AHEAD)
    return (((words[::4] >> np.uint64(41)) + 0.5) / (1 << 23)).astype(np.float32)
