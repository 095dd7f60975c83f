"""The dtype that a Gaudi computes in."""

from __future__ import annotations

import torch

from trencadis.core.errors import StartupError

ALIASES = {"float": "float32"}
TAKEN = ("bfloat16", "float32")


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype for ``asked`` (``--dtype``): ``auto`` is bfloat16, whatever the checkpoint stores.

    Raises StartupError for float16: its range is too small for the activations of these models, and it is no faster.
    """
    name = "bfloat16" if asked == "auto" else ALIASES.get(asked, asked)
    if name not in TAKEN:
        raise StartupError(f"--dtype {asked} is not supported on hpu; use {' or '.join(TAKEN)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
