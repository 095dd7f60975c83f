"""The one random number of a sampled token, drawn on the host. Torch-free.

Philox 4x64 (Salmon et al., SC'11) with key = (seed, choice) and counter = index of the output token: no state to lose
in a preemption, and the same number on every rank and device.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, index: int) -> float:
    """A float32-exact number in (0, 1): 23 random bits, centred in their interval."""
    raw = np.random.Philox(key=[seed & _MASK, choice & _MASK], counter=[index, 0, 0, 0]).random_raw()
    return ((int(raw) >> 41) + 0.5) / (1 << 23)
