"""VISION: windows as one batch, whole images in tiles of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.hpu.attention.attention_input_types import AttentionKernels, MaskedSegments
from trencadis.backends.hpu.attention.plain_attention import Cut, mask_rows, plain, plain_rows, softmax_mode
from trencadis.backends.hpu.habana_bridge import fused_attention
from trencadis.core.device.backend import Segments
from trencadis.core.vision_config import WINDOW_SLOTS

CUT_TILES = 64
"""Number of tiles between two graph cuts."""


def prepare_segments(seg: Segments) -> MaskedSegments:
    """Builds the masks of windows, and the image of every slot."""
    position = torch.arange(WINDOW_SLOTS, device=seg.real.device, dtype=torch.int32)
    visible = position < seg.real[:, None, None, None]  # [W, 1, 1, 64]
    # Every result has memory of its own: a view that leaves a compiled region would be taken eagerly. One window's
    # numbers are a view of one number until they are copied.
    image = seg.segment[:, None].expand(-1, WINDOW_SLOTS).reshape(-1).clone()
    key = image.masked_fill(~visible.reshape(-1), -1)
    solid = None
    if seg.padding_window is not None:
        solid = seg.padding_window[:, None].expand(-1, WINDOW_SLOTS).reshape(-1) == 0
    return MaskedSegments(seg.segment, seg.real, visible, image, key, solid)


def attend_windows(
    q: Tensor, k: Tensor, v: Tensor, seg: MaskedSegments, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes attention [s, h, d] over windows [W, h, 64, d] at once; the padding of a window is masked as keys."""
    shape = (-1, WINDOW_SLOTS, *q.shape[1:])
    queries, keys, values = (t.view(shape).transpose(1, 2) for t in (q, k, v))
    if kernels.sdpa is None:
        out = plain(queries, keys, values, seg.visible, scale, fp32, kernels)
    else:
        mode = softmax_mode(q.dtype, fp32, "None")
        out = fused_attention(kernels.sdpa, queries, keys, values, seg.visible, False, scale, mode)
    return out.transpose(1, 2).reshape(q.shape)


def attend_images(
    q: Tensor, k: Tensor, v: Tensor, seg: MaskedSegments, scale: float, fp32: bool, kernels: AttentionKernels, cut: Cut
) -> Tensor:
    """Computes attention [s, h, d] over whole images, a tile of queries at a time, each with a mask made in the
    graph.
    """
    count, mode = q.shape[0], softmax_mode(q.dtype, fp32, "None")
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    size = plain_rows(count) if kernels.sdpa is None else mask_rows(count)
    out = []
    for tile, start in enumerate(range(0, count, size)):
        if tile and tile % CUT_TILES == 0:
            cut()
        some = queries[:, :, start : start + size]
        visible = (seg.image[start : start + size, None] == seg.key)[None, None]
        if seg.solid is not None:
            visible = visible & (seg.solid[start : start + size, None] | seg.solid)[None, None]
        if kernels.sdpa is None:
            out.append(plain(some, keys, values, visible, scale, fp32, kernels))
        else:
            out.append(fused_attention(kernels.sdpa, some, keys, values, visible, False, scale, mode))
    joined = out[0] if len(out) == 1 else torch.cat(out, dim=2)
    return joined[0].transpose(0, 1)
