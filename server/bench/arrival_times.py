"""Send times of requests: all at once, at a rate, or at a growing rate."""

from __future__ import annotations

import math

import numpy as np


def make_rates(count: int, rate: float, ramp: str = "", start: float = 0.0, end: float = 0.0) -> list[float]:
    """Returns the request rate at each request, per second: constant, or from ``start`` to ``end`` (``linear`` or
    ``exponential``).
    """
    if not ramp:
        return [rate] * count
    shares = [i / max(count - 1, 1) for i in range(count)]
    if ramp == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


def make_send_times(given: list[float], burstiness: float, seed: int, fixed: bool) -> list[float]:
    """Returns the seconds after the start at which requests are sent.

    The gaps are drawn from gamma distributions of shape ``burstiness`` around 1 / rate: 1 is a Poisson process, less
    has bursts, infinity none. With ``fixed`` the whole is scaled to take count / rate seconds, so that runs with
    different seeds offer the same load.
    """
    rng = np.random.default_rng(seed)
    gaps = []
    for rate in given:
        if math.isinf(rate) or rate <= 0:
            gaps.append(0.0)
        elif math.isinf(burstiness):
            gaps.append(1.0 / rate)
        else:
            gaps.append(float(rng.gamma(burstiness, 1.0 / (rate * burstiness))))
    found = np.cumsum(gaps)
    if fixed and len(found) and found[-1] > 0:
        found *= len(given) / given[0] / found[-1]
    return [float(one) for one in found]
