"""The one thing of scipy that the tests would need."""

from __future__ import annotations


def chi_square_limit(freedom: int, z: float = 3.0902) -> float:
    """The 99.9 % point of chi-square (Wilson and Hilferty 1931), within 1 % from 2 degrees of freedom."""
    if freedom < 1:
        return 1e-6
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + z * part**0.5) ** 3)
