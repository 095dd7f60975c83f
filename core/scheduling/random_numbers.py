"""Random numbers for sampling, one per token, generated on the host by a counter-based generator (Philox 4x64).

Torch-free. Philox 4x64 (Salmon et al., SC'11) with key = (seed, choice) and counter = index of the output token. There
is no state that a preemption could lose, and every rank and device gets the same number.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np

from trencadis.core.step import Float32

_MASK = (1 << 64) - 1
AHEAD = 128
"""Numbers generated at a time: setting up a generator takes as long as some hundred numbers."""

KEPT = 384
"""Number of cached batches of numbers; a dropped batch is generated again."""


class _Generator(threading.local):
    """One generator per thread, set up for each batch: creating one takes twice as long as everything else."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._state: Any = self._philox.state

    def words(self, seed: int, choice: int, counter: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Returns uint64 [count]: the words from ``counter`` on, under the key (seed, choice)."""
        inner = self._state["state"]
        inner["key"][0], inner["key"][1], inner["counter"][0] = seed, choice, counter
        self._philox.state = self._state
        drawn: np.ndarray[Any, np.dtype[np.uint64]] = self._philox.random_raw(count)
        return drawn


_generator = _Generator()


def uniform(seed: int, choice: int, index: int) -> float:
    """Returns a float32-exact number in (0, 1): 23 random bits, centred in their interval."""
    return float(numbers(seed, choice, index // AHEAD)[index % AHEAD])


def numbers(seed: int, choice: int, part: int) -> Float32:
    """Returns float32 [AHEAD], read-only: the numbers of the output tokens from ``part * AHEAD`` on."""
    return _numbers(seed & _MASK, choice & _MASK, part)


@lru_cache(maxsize=KEPT)
def _numbers(seed: int, choice: int, part: int) -> Float32:
    """Generates AHEAD numbers, each from the first of the four words of its counter."""
    words = _generator.words(seed, choice, part * AHEAD, 4 * AHEAD)
    made: Float32 = (((words[::4] >> np.uint64(41)) + 0.5) / (1 << 23)).astype(np.float32)
    return made
