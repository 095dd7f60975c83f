"""Calls of the plug-in's fused attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def fused_attention(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    mode: str,
) -> Tensor:  # fmt: skip
    """Computes attention [B, h, S, d] over [B, g, T, d] by the plug-in's ``FusedSDPA``.

    ``recompute_mode`` is always given: where it is None the wrapper asks a function of the plug-in's C library, which
    Dynamo cannot trace. ``True`` is what the wrapper finds by default.
    """
    return kernel(q, k, v, mask, 0.0, causal, scale, mode, True, None, "right")
