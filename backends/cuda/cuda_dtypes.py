"""Which dtype an NVIDIA card computes in."""

from __future__ import annotations

import torch

from trencadis.core.errors import StartupError

ALIASES = {"float": "float32", "half": "float16"}
TAKEN = ("bfloat16", "float16", "float32")


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """``asked`` resolved: ``auto`` is the stored type where it has 16 bits, else bfloat16."""
    name = ALIASES.get(asked, asked)
    if asked == "auto":
        name = stored if stored in ("bfloat16", "float16") else "bfloat16"
    if name not in TAKEN:
        raise StartupError(f"--dtype {asked} is not supported on cuda; use {', '.join(TAKEN[:-1])} or {TAKEN[-1]}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def exact(dtype: torch.dtype) -> None:
    """Has products of float32 computed in float32, where that is the ``dtype`` of an engine: torch takes TF32 for them
    in NVIDIA's containers, which ask for it by the environment, or where the process asked for it."""
    if dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")
