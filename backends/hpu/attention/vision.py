"""VISION: windows as one batch, whole pictures in tiles of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.hpu.attention.softmax import AttentionKernels, Cut, mask_rows, plain, plain_rows, softmax_mode
from trencadis.backends.hpu.attention.tensors import MaskedSegments
from trencadis.core.backend import Segments
from trencadis.core.layout import WINDOW_SLOTS

CUT_TILES = 64
"""Tiles between two graph cuts."""


def prepare_segments(seg: Segments) -> MaskedSegments:
    """The masks of windows, and the image of every slot."""
    place = torch.arange(WINDOW_SLOTS, device=seg.real.device, dtype=torch.int32)
    seen = place < seg.real[:, None]  # [W, 64]
    image = seg.segment[:, None].expand(-1, WINDOW_SLOTS)
    key = image.masked_fill(~seen, -1)
    solid = None
    if seg.ghost is not None:
        solid = (seg.ghost == 0)[:, None].expand(-1, WINDOW_SLOTS).reshape(-1)
    return MaskedSegments(seg.segment, seg.real, seen[:, None, None], image.reshape(-1), key.reshape(-1), solid)


def attend_windows(
    q: Tensor, k: Tensor, v: Tensor, seg: MaskedSegments, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """[s, h, d]: attention on [W, h, 64, d] at once; the padding of a window is masked as keys."""
    shape = (-1, WINDOW_SLOTS, *q.shape[1:])
    queries, keys, values = (t.view(shape).transpose(1, 2) for t in (q, k, v))
    if kernels.sdpa is None:
        out = plain(queries, keys, values, seg.seen, scale, fp32, kernels)
    else:
        out = kernels.sdpa(queries, keys, values, seg.seen, 0.0, False, scale, softmax_mode(q.dtype, fp32, "None"))
    return out.transpose(1, 2).reshape(q.shape)


def attend_images(
    q: Tensor, k: Tensor, v: Tensor, seg: MaskedSegments, scale: float, fp32: bool, kernels: AttentionKernels, cut: Cut
) -> Tensor:
    """[s, h, d]: whole pictures, a tile of queries at a time, each with a mask made in the graph."""
    count, mode = q.shape[0], softmax_mode(q.dtype, fp32, "None")
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    size = plain_rows(count) if kernels.sdpa is None else mask_rows(count)
    out = []
    for tile, start in enumerate(range(0, count, size)):
        if tile and tile % CUT_TILES == 0:
            cut()
        some = queries[:, :, start : start + size]
        seen = (seg.image[start : start + size, None] == seg.key)[None, None]
        if seg.solid is not None:
            seen = seen & (seg.solid[start : start + size, None] | seg.solid)[None, None]
        if kernels.sdpa is None:
            out.append(plain(some, keys, values, seen, scale, fp32, kernels))
        else:
            out.append(kernels.sdpa(some, keys, values, seen, 0.0, False, scale, mode))
    joined = out[0] if len(out) == 1 else torch.cat(out, dim=2)
    return joined[0].transpose(0, 1)
