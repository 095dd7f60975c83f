"""FRESH: prompts without context attend to the launch's own keys and values; nothing is read from the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.hpu.attention.attention_inputs import FreshAttn
from trencadis.backends.hpu.attention.softmax import AttentionKernels, plain, plain_rows, softmax_mode
from trencadis.backends.hpu.fused_sdpa import fused_attention


def attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, attn: FreshAttn, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes attention [n, h, d] over keys and values [n, g, d], causal inside each row.

    Padding comes last in a row, so causality hides it.
    """
    rows = attn.length.shape[0]
    queries, keys, values = (t.view(rows, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    if kernels.sdpa is not None:
        mode = softmax_mode(q.dtype, fp32, "fast")
        out = fused_attention(kernels.sdpa, queries, keys, values, None, True, scale, mode)
    else:
        out = _causal(queries, keys, values, scale, fp32, kernels)
    return out.transpose(1, 2).reshape(q.shape)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, fp32: bool, kernels: AttentionKernels) -> Tensor:
    """Computes causal attention [R, h, T, d] in tiles of queries, each over the keys up to its end."""
    count = q.shape[2]
    position = torch.arange(count, device=q.device, dtype=torch.int32)
    tile = plain_rows(count)
    out = []
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        visible = (position[:stop] <= position[start:stop, None])[None, None]
        out.append(plain(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], visible, scale, fp32, kernels))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)
