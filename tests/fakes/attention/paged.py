"""Attention over pages as one call, which reads lengths when it runs, as a kernel in a graph does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from trencadis.backends.cpu.ops import CpuOps
from trencadis.core.device.backend import Attn, LayerKV

BY_LENGTH = CpuOps()
_CALLS = torch.library.Library("fake_attention", "DEF")  # type: ignore[no-untyped-call]


class KernelFault(AssertionError):
    """What a kernel would do with memory that is not its own, or with what it never wrote."""


def capturing() -> bool:
    """Whether calls are recorded into a graph now."""
    return _get_current_dispatch_mode() is not None  # type: ignore[no-untyped-call]


def attended(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, table: list[Tensor], scale: float, window: int
) -> Tensor:
    """[n, h, d]: row r has the queries ``starts[r] : starts[r + 1]``, the last ones of its ``keys[r]`` keys; 0 where a
    query sees no key, NaN where no row has the token."""
    out = torch.full_like(q, float("nan"))
    begin, lengths = starts.tolist(), keys.tolist()
    for row, (first, stop) in enumerate(pairwise(begin)):
        count, held = stop - first, lengths[row]
        if count == 0:
            continue
        if held < count:
            if held:
                raise KernelFault(f"row {row}: {count} queries, {held} keys")
            out[first:stop] = 0
            continue
        pages = table[row][: -(-held // k.shape[1])]
        if len(pages) * k.shape[1] < held or int(pages.min()) < 0 or int(pages.max()) >= len(k):
            raise KernelFault(f"row {row}: pages {pages.tolist()} for {held} keys of a cache of {len(k)}")
        place = torch.tensor([0, count, count], dtype=torch.int32)  # the last row is that of surplus tokens
        context = torch.tensor([held - count, 0], dtype=torch.int32)
        own = q[first:stop]
        attn = Attn(place, context, pages.int().expand(2, -1), place, None)
        out[first:stop] = BY_LENGTH.attend(own, own, own, LayerKV(k, v), attn, scale, window)
    return out


def offered(schema: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator of ``schema``."""
    name = schema.partition("(")[0]
    _CALLS.define(schema)  # type: ignore[no-untyped-call]
    _CALLS.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    found: Callable[..., Tensor] = getattr(torch.ops.fake_attention, name)
    return found
