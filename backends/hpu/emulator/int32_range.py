"""64-bit integers: the card keeps 32 bits of them, so a value that needs more is refused instead of wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator import refusals

LIMIT = 2**31
"""Values lie in [-LIMIT, LIMIT), as with ``PT_ENABLE_INT64_SUPPORT=0``, the default."""


def check_host(tensor: Tensor) -> None:
    """Refuses a host tensor with values that the card would change by narrowing them to 32 bits."""
    _require_int32("copy", tensor)


@cache
def check_int32(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps ``function`` so that int64 results beyond 32 bits are refused."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, Tensor) and leaf.dtype is torch.int64:
                _require_int32(name, leaf)
        return out

    return run


def _require_int32(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.int64 or tensor.is_meta or tensor.numel() == 0:
        return
    low, high = (int(t) for t in tensor.aminmax())
    if low < -LIMIT or high >= LIMIT:
        raise refusals.too_wide(name, high if high >= LIMIT else low)
