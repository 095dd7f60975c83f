"""Picks the dtype that the CPU computes in."""

from __future__ import annotations

import torch

ALIASES = {"float": "float32", "half": "float16"}


def native_bfloat16() -> bool:
    """Returns True if the CPU multiplies bfloat16 itself (AVX512-BF16 or AMX).

    Elsewhere bfloat16 is several times slower than float32.
    """
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype for ``asked``: ``auto`` is the stored dtype if the CPU computes in it natively, else
    float32.
    """
    if asked == "auto":
        asked = "bfloat16" if stored == "bfloat16" and native_bfloat16() else "float32"
    dtype: torch.dtype = getattr(torch, ALIASES.get(asked, asked))
    return dtype
