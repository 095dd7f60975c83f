"""Distances between floats in units of the last place."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def ordered(x: Tensor) -> Tensor:
    """int64 numbers in the order of the floats, one apart where the floats are neighbours; both zeros are 0."""
    bits = x.contiguous().view(BITS[x.dtype]).long()
    return torch.where(bits >= 0, bits, -(bits + (1 << (8 * x.element_size() - 1))))


def assert_within_last_places(got: Tensor, exact: Tensor, places: int = 2) -> None:
    """``got`` lies at most ``places`` units in the last place from ``exact`` rounded to its dtype.

    ``exact`` is float32 or wider; a ``got`` of float32 may differ by 1e-5.
    """
    assert got.shape == exact.shape, (got.shape, exact.shape)
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, exact.float(), rtol=1e-5, atol=1e-5)
        return
    away = (ordered(got) - ordered(exact.to(got.dtype))).abs()
    assert not got.isnan().any()
    most = int(away.max() if away.numel() else 0)
    assert most <= places, f"{most} units in the last place away"
