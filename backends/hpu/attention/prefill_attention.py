"""Attention of prompts: without context (FRESH), and after stored tokens (CONTEXT); and the fused kernel's limits.

FRESH attends to the launch's own keys and values; nothing is read from the cache. CONTEXT is one row of new tokens
after stored ones; its own keys and values come from the launch as well. A short chunk after a short context is one
masked call. Otherwise stored tokens come in slices, so that no more than one slice of the row's keys and values exists
at a time, and the chunk is attended to causally, without a mask; the partial results of the slices are merged. The
limits are checked from a bucket's shape before anything runs: beyond them a card returns NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trencadis.backends.hpu.attention import quantised_kv_cache
from trencadis.backends.hpu.attention.attention_input_types import (
    AttentionKernels,
    ContextAttn,
    FreshAttn,
    JoinedContext,
    SlicedContext,
)
from trencadis.backends.hpu.attention.plain_attention import (
    MASK_BYTES,
    MASK_ITEM,
    QUERY_TILE,
    MergedParts,
    lowest,
    mask_rows,
    plain,
    plain_part,
    plain_rows,
    softmax_mode,
)
from trencadis.backends.hpu.habana_bridge import AttentionPart, fused_attention
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import LayerKV
from trencadis.core.errors import StartupError


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


CAUSAL_STEP = 1024
"""The fused kernel's statistics of a causal call are correct only for multiples of this many tokens."""


def prepare_context(attn: ContextAttn, size: int, slice_tokens: int) -> JoinedContext | SlicedContext:
    """Builds the masks of a launch, for blocks of ``size`` tokens and slices of ``slice_tokens``."""
    count, blocks = attn.slot.shape[0], attn.block_list.shape[0]
    device = attn.slot.device
    if blocks * size <= slice_tokens and count <= QUERY_TILE:
        position = torch.arange(count, device=device, dtype=torch.int32)
        before = torch.arange(blocks * size, device=device, dtype=torch.int32) < attn.context
        visible = torch.cat([before.expand(1, 1, count, -1), _own_mask(attn, position)], dim=3)
        return JoinedContext(attn.slot, attn.block_list, visible)
    step = max(slice_tokens // size, 1)
    visible_by_slice, weight = [], []
    for i, start in enumerate(range(0, blocks, step)):
        left = attn.context - i * step * size
        position = torch.arange(min(step, blocks - start) * size, device=device, dtype=torch.int32)
        visible_by_slice.append(position[None, None, None] < left.clamp_min(1))
        weight.append((left <= 0).float() * lowest(torch.float32))
    own = None
    if attn.upto is not None:
        own = _own_mask(attn, torch.arange(count, device=device, dtype=torch.int32))
    return SlicedContext(attn.slot, attn.block_list, step, tuple(visible_by_slice), tuple(weight), own)


def _own_mask(attn: ContextAttn, position: Tensor) -> Tensor:
    """Returns bool [1, 1, T, T]: which tokens of the chunk each of them attends to."""
    last = position if attn.upto is None else attn.upto - attn.context
    return position <= last[None, None, :, None]


def attend_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: LayerKV,
    attn: JoinedContext | SlicedContext,
    size: int,
    scale: float,
    fp32: bool,
    kernels: AttentionKernels,
) -> Tensor:
    """Computes attention [T, h, d] over the stored tokens and over the chunk's own keys [T, g, d], causal inside the
    chunk.
    """
    queries = q.transpose(0, 1)[None]
    if isinstance(attn, SlicedContext):
        own = [t.transpose(0, 1)[None] for t in (k, v)]
        out = _attend_slices(queries, own[0], own[1], kv, attn, size, scale, fp32, kernels)
        return out[0].transpose(0, 1).to(q.dtype)
    keys, values = (
        torch.cat([stored, own.transpose(0, 1)[None]], dim=2)
        for stored, own in zip(stored_keys(kv, attn.block_list, size, q.dtype, kernels), (k, v), strict=True)
    )
    if kernels.sdpa is None:
        out = plain(queries, keys, values, attn.visible, scale, fp32, kernels)
    else:
        mode = softmax_mode(q.dtype, fp32, "fast")
        out = fused_attention(kernels.sdpa, queries, keys, values, attn.visible, False, scale, mode)
    return out[0].transpose(0, 1)


def _attend_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: LayerKV,
    attn: SlicedContext,
    size: int,
    scale: float,
    fp32: bool,
    kernels: AttentionKernels,
) -> Tensor:
    """Returns float32 [1, h, T, d]: attends to the chunk itself first, then to each slice, for every range of
    queries.
    """

    def part(start: int, stop: int, keys: Tensor, values: Tensor, visible: Tensor | None) -> AttentionPart:
        some = q[:, :, start:stop]
        if kernels.parts is None:
            assert visible is not None
            return plain_part(some, keys, values, visible, scale, fp32, kernels)
        mode = softmax_mode(q.dtype, fp32, "fast")
        return kernels.parts(some, keys, values, visible, visible is None, scale, mode)

    count = q.shape[2]
    position = torch.arange(count, device=q.device, dtype=torch.int32)
    lists = torch.split(attn.block_list, attn.step)
    ranges, merged = _ranges(count, size * lists[0].shape[0], kernels), []
    for start, stop in ranges:
        causal = kernels.parts is not None and start == 0 and stop % CAUSAL_STEP == 0
        visible = None if causal else (position[:stop] <= position[start:stop, None])[None, None]
        if attn.own is not None:
            merged.append(MergedParts(part(start, stop, k, v, attn.own[:, :, start:stop])))
            continue
        merged.append(MergedParts(part(start, stop, k[:, :, :stop], v[:, :, :stop], visible)))
    for listed, visible, weight in zip(lists, attn.visible, attn.weight, strict=True):
        keys, values = stored_keys(kv, listed, size, q.dtype, kernels)
        for (start, stop), one in zip(ranges, merged, strict=True):
            one.add(part(start, stop, keys, values, visible), weight)
    out = [one.out(kernels.sinks) for one in merged]
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _ranges(count: int, keys: int, kernels: AttentionKernels) -> list[tuple[int, int]]:
    """Returns ranges (start, stop) of queries that are attended together: for the fused kernel its causal call, and the
    rest.
    """
    if kernels.parts is None:
        step = plain_rows(keys + count)
        return [(start, min(start + step, count)) for start in range(0, count, step)]
    whole = count // CAUSAL_STEP * CAUSAL_STEP
    return [(a, b) for a, b in ((0, whole), (whole, count)) if a < b]


def stored_keys(
    kv: LayerKV, block_list: Tensor, size: int, dtype: torch.dtype, kernels: AttentionKernels
) -> Iterator[Tensor]:
    """Yields keys, then values [1, g, B x b, d] of the listed blocks of a flat cache."""
    if kv.k_scale is not None:
        yield from quantised_kv_cache.gather_stored(kv, block_list, size, dtype, kernels)
        return
    for cache in kv[:2]:
        found = cache.view(-1, size, *cache.shape[1:]).index_select(0, block_list)
        yield found.view(1, -1, *cache.shape[1:]).transpose(1, 2)


def largest_mask(bucket: Bucket, block_size: int, slice_tokens: int) -> int:
    """Returns the bytes of a head's largest mask in one call of the fused kernel; FRESH and DECODE have none."""
    if bucket.stage is Stage.VISION:
        slots = bucket.dims[0]
        return MASK_ITEM * min(mask_rows(slots), slots) * slots
    if bucket.stage is not Stage.CONTEXT:
        return 0
    tokens, stored = bucket.dims[0], bucket.dims[1] * block_size
    if tokens <= QUERY_TILE and stored <= slice_tokens:
        return MASK_ITEM * tokens * (stored + tokens)
    return MASK_ITEM * max(tokens % CAUSAL_STEP * tokens, min(stored, slice_tokens))


def check_bucket(bucket: Bucket, block_size: int, slice_tokens: int) -> None:
    """Raises StartupError for a bucket whose launches would exceed ``MASK_BYTES``."""
    count = largest_mask(bucket, block_size, slice_tokens)
    if count > MASK_BYTES:
        raise StartupError(
            f"bucket {bucket} needs an attention mask of {count} bytes a head and Gaudi's kernel takes {MASK_BYTES}: "
            "lower --max-num-batched-tokens or max_pixels of --mm-processor-kwargs."
        )
