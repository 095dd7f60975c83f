"""8-bit KV caches for tests of ops: random codes of keys that were stored, and the trial of key biases."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.device.backend import LayerKV
from trencadis.core.models.kv_cache_quantisation import kept_type, pairs_of, read_slots, store

HEAD = 128
TABLE = {
    "int8": (0.026, 0.23, 1.37), "fp8 and 4 pairs": (0.10, 0.10, 0.10),
    "int8 and 4 pairs": (0.025, 0.025, 0.035),
}  # fmt: skip
"""Root mean square errors of attention scores by the largest key bias: 0, 50 and 300 (docs/quantisation.md)."""

BIASES = (0, 50, 300)


def empty(name: str, tokens: tuple[int, ...], heads: int, d: int, kept: int, dtype: torch.dtype) -> LayerKV:
    """A cache of zeros, without ``pairs``: ``tokens`` are its leading dimensions."""

    def made(kind: torch.dtype, *last: int) -> Tensor:
        return torch.zeros((*tokens, heads, *last), dtype=kind)

    codes = torch.int8 if name == "int8" else torch.uint8
    beside = made(kept_type(dtype), kept) if kept else None
    return LayerKV(made(codes, d), made(codes, d), made(torch.float16), made(torch.float16), beside)


def filled(
    name: str, blocks: int, size: int, heads: int, d: int, kept: int, dtype: torch.dtype, generator: torch.Generator
) -> LayerKV:
    """A cache whose slots hold random tokens; values of keys that are kept are large."""
    cache = empty(name, (blocks, size), heads, d, kept, dtype)
    bias = torch.randn(heads, d, generator=generator)
    if kept:
        cache = cache._replace(pairs=pairs_of(bias, kept))
        bias.scatter_(1, cache.pairs.long(), 60.0)  # type: ignore[union-attr]
    k, v = (torch.randn(blocks * size, heads, d, generator=generator) for _ in range(2))
    store((k + bias).to(dtype), v.to(dtype), cache, torch.arange(blocks * size))
    return cache


def score_error(cache: str, bias: float, count: int = 384) -> float:
    """Root mean square error of scores of ``count`` queries over as many keys, one value of whose bias is ``bias``."""
    generator = torch.Generator().manual_seed(1)
    own = torch.randn(HEAD, generator=generator) * 0.5
    own[11] = bias
    angle = torch.arange(count)[:, None] * torch.logspace(0, -5, HEAD // 2)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    k = turned(torch.randn(count, HEAD, generator=generator) + own)
    q = turned(torch.randn(count, HEAD, generator=generator) * 4)
    name, kept = cache.split()[0], 8 if "pairs" in cache else 0
    made = empty(name, (1, count), 1, HEAD, kept, torch.float32)
    made = made._replace(pairs=pairs_of(own[None], kept)) if kept else made
    store(k[:, None], k[:, None], made, torch.arange(count))
    held = read_slots(made, slice(0, count), torch.float32)[0][:, 0]
    return float((q @ (held - k).T / HEAD**0.5).square().mean().sqrt())
