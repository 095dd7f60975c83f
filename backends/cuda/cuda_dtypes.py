"""The dtype that an NVIDIA card computes in."""

from __future__ import annotations

import torch

from trencadis.core.errors import StartupError

ALIASES = {"float": "float32", "half": "float16"}
TAKEN = ("bfloat16", "float16", "float32")


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype for ``asked`` (``--dtype``): ``auto`` is the stored dtype if it has 16 bits, else bfloat16.

    Raises StartupError for a dtype that the kernels do not support.
    """
    name = ALIASES.get(asked, asked)
    if asked == "auto":
        name = stored if stored in ("bfloat16", "float16") else "bfloat16"
    if name not in TAKEN:
        raise StartupError(f"--dtype {asked} is not supported on cuda; use {', '.join(TAKEN[:-1])} or {TAKEN[-1]}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def exact(dtype: torch.dtype) -> None:
    """Makes torch compute float32 products in float32, if that is the engine's ``dtype``.

    Otherwise torch would use TF32 where the process or the environment requests it, as NVIDIA's containers do.
    """
    if dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")
