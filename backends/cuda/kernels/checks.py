"""What the attention kernels take for granted. A captured program launches once in Python, so each is checked once."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.errors import StartupError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK_SIZES = (16, 32, 64, 128)
GROUPS = range(1, 9)
HEADS = range(16, 129, 16)


def supported(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    """Raises StartupError, with what would work, where no kernel fits a model.

    Args:
        head_dim: values of a head. group: query heads of a KV head, on one rank.
    """
    if head_dim not in HEADS:
        raise StartupError(
            f"heads of {head_dim} values: the cuda kernels take multiples of 16 up to 128; --device cpu takes any"
        )
    if group not in GROUPS:
        raise StartupError(f"{group} query heads a KV head: the cuda kernels take 1 to 8; --device cpu takes any")
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise StartupError(f"--block-size {block_size}: the cuda kernels take {sizes}; --device cpu takes any")
    if dtype not in DTYPES:
        raise StartupError(f"{dtype}: the cuda kernels compute in float16, bfloat16 and float32 (--dtype)")


def paged(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Queries and cache of one text launch."""
    _packed_heads(q)
    assert out.shape == q.shape and out.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert k.shape == v.shape and k.shape[3] == q.shape[2] and q.shape[1] % k.shape[2] == 0
    assert q.dtype == k.dtype == v.dtype == out.dtype


def packed(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Queries, keys and values of one vision launch."""
    for t in (q, k, v, out):
        _packed_heads(t)
        assert t.shape == q.shape and t.dtype == q.dtype
    assert q.shape[0] % 64 == 0


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """What is turned, and by what."""
    for t in (q, k, out):
        _packed_heads(t)
    assert out.shape == q.shape and k.shape[0] == q.shape[0] and k.shape[2] == q.shape[2]
    for t in (cos, sin):
        assert t.shape == (q.shape[0], q.shape[2]) and t.is_contiguous() and t.dtype == torch.float32


def _packed_heads(t: Tensor) -> None:
    assert t.dtype in DTYPES and t.shape[2] in HEADS
    assert t.stride(2) == 1 and t.stride(1) == t.shape[2]
