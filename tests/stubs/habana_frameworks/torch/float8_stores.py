"""``index_copy`` of 8-bit floats on the CPU, which stands for the card: torch has it there for other types alone."""

from __future__ import annotations

import warnings

import torch

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
LIBRARY: list[torch.library.Library] = []
"""Kept, because its kernels are gone with it."""


def store(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """In place; 8-bit floats are copied as bytes."""
    into, values = (t.view(torch.uint8) if t.dtype in FLOATS else t for t in (target, source))
    torch.ops.aten.index_copy.out(into, dim, index, values, out=into)
    return target


def stored(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return store(target.clone(), dim, index, source)


def register() -> None:
    """Replaces torch's kernels."""
    LIBRARY.append(torch.library.Library("aten", "IMPL", "CPU"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LIBRARY[0].impl("index_copy_", store)
        LIBRARY[0].impl("index_copy", stored)
