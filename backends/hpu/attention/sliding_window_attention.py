"""Sliding windows, and tokens that attend beyond their own position: masked calls over the keys that a tile can reach.

The other forms of this package hide keys by causality alone. Here each tile of queries has a mask, made once per
launch,
and keys that no query of a tile attends to are left out where the shapes allow it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.hpu.attention.attention_input_types import AttentionKernels, ContextAttn, FreshAttn
from trencadis.backends.hpu.attention.plain_attention import mask_rows, plain, plain_rows, softmax_mode
from trencadis.backends.hpu.habana_bridge import fused_attention


class MaskedTile(NamedTuple):
    """Queries [start, stop) of the launch's rows over its own keys [first, end), preceded by the stored keys if
    ``stored``.
    """

    start: int
    stop: int
    first: int
    end: int
    stored: bool
    visible: Tensor  # bool [1 or R, 1, stop - start, stored keys + end - first]


class MaskedRows(NamedTuple):
    """FRESH where a sliding window or a span makes visibility differ from causality."""

    slot: Tensor
    rows: int
    tiles: tuple[MaskedTile, ...]


class WindowContext(NamedTuple):
    """CONTEXT, over the stored tokens within the sliding window of the chunk's first token."""

    slot: Tensor
    near_slots: Tensor  # int32 [blocks] of those tokens, in order
    tiles: tuple[MaskedTile, ...]


class PerWindow(NamedTuple):
    """Attention inputs of a launch, computed for each distinct window of the model's layers."""

    slot: Tensor
    windows: tuple[int, ...]
    each: tuple[object, ...]


def prepare_fresh(attn: FreshAttn, window: int, kernels: AttentionKernels) -> FreshAttn | MaskedRows:
    """Builds the masks of FRESH; returns ``attn`` itself where causality is all that is needed."""
    rows = attn.length.shape[0]
    count = attn.slot.shape[0] // rows
    if attn.upto is None and not 0 < window < count:
        return attn
    tiles = []
    position = torch.arange(count, device=attn.slot.device, dtype=torch.int32)
    upto = None if attn.upto is None else attn.upto.view(rows, 1, count, 1)
    for start, stop, first, end in _ranges(count, window, upto is not None, kernels):
        last = position[start:stop, None] if upto is None else upto[:, :, start:stop]
        visible = _make_mask(position[first:end], position[start:stop, None], last, window)
        mask = visible if upto is not None else visible[None, None].clone()  # no view may leave a compiled region
        tiles.append(MaskedTile(start, stop, first, end, False, mask))
    return MaskedRows(attn.slot, rows, tuple(tiles))


def attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, attn: MaskedRows, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes attention [n, h, d] over [n, g, d], row by row of the rectangle."""
    queries, keys, values = (t.view(attn.rows, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    out = []
    for t in attn.tiles:
        query, key, value = queries[:, :, t.start : t.stop], keys[:, :, t.first : t.end], values[:, :, t.first : t.end]
        out.append(_attend(query, key, value, t.visible, scale, fp32, kernels))
    joined = out[0] if len(out) == 1 else torch.cat(out, dim=2)
    return joined.transpose(1, 2).reshape(q.shape)


def prepare_context(attn: ContextAttn, window: int, size: int, kernels: AttentionKernels) -> WindowContext:
    """Lists the blocks of ``size`` tokens within the window of the first token; builds masks over them and the
    chunk.
    """
    count, blocks = attn.slot.shape[0], attn.block_list.shape[0]
    near_blocks = min(blocks, -(-(window - 1) // size) + 1)
    position = torch.arange(max(count, near_blocks * size), device=attn.slot.device, dtype=torch.int32)
    skipped = ((attn.context - (window - 1)).clamp_min(0) // size).clamp_max(blocks - near_blocks)
    listed = attn.block_list.index_select(0, position[:near_blocks] + skipped)
    stored = position[: near_blocks * size] + skipped * size
    own = attn.context + position[:count]
    tiles = []
    for start, stop, first, end in _ranges(count, window, attn.upto is not None, kernels, near_blocks * size):
        reached = start < window - 1
        query = own[start:stop, None]
        last = query if attn.upto is None else attn.upto[start:stop, None]
        visible = _make_mask(own[first:end], query, last, window)
        if reached:
            before = _make_mask(stored, query, attn.context - 1, window)
            visible = torch.cat([before, visible], dim=1)
        tiles.append(MaskedTile(start, stop, first, end, reached, visible[None, None].clone()))
    return WindowContext(attn.slot, listed, tuple(tiles))


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple[Tensor, Tensor], attn: WindowContext, scale: float, fp32: bool,
    kernels: AttentionKernels,
) -> Tensor:  # fmt: skip
    """Computes attention [T, h, d] over the chunk's [T, g, d] and the ``stored`` keys and values [1, g, N, d] of near
    blocks.
    """
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = []
    for t in attn.tiles:
        sides = [x[:, :, t.first : t.end] for x in (keys, values)]
        if t.stored:
            sides = [torch.cat([before, own], dim=2) for before, own in zip(stored, sides, strict=True)]
        out.append(_attend(queries[:, :, t.start : t.stop], sides[0], sides[1], t.visible, scale, fp32, kernels))
    joined = out[0] if len(out) == 1 else torch.cat(out, dim=2)
    return joined[0].transpose(0, 1)


def _make_mask(key: Tensor, query: Tensor, last: Tensor, window: int) -> Tensor:
    """Returns a bool mask: the keys (by position) that queries at positions ``query`` attend to, up to ``last``."""
    visible = key <= last
    return visible & (key > query - window) if window else visible


class _TileRange(NamedTuple):
    """A tile's queries [start, stop), and the row's own keys [first, end) that any of them attends to."""

    start: int
    stop: int
    first: int
    end: int


def _ranges(count: int, window: int, further: bool, kernels: AttentionKernels, stored: int = 0) -> list[_TileRange]:
    """Cuts ``count`` queries into tiles that the kernel takes."""
    rows = plain_rows(count + stored) if kernels.sdpa is None else mask_rows(count + stored)
    found = []
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        first = max(start - window + 1, 0) if window else 0
        found.append(_TileRange(start, stop, first, count if further else stop))
    return found


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes attention [R, h, S, d] over [R, g, T, d] with the mask ``visible``."""
    if kernels.sdpa is None:
        return plain(q, k, v, visible, scale, fp32, kernels)
    return fused_attention(kernels.sdpa, q, k, v, visible, False, scale, softmax_mode(q.dtype, fp32, "fast"))
