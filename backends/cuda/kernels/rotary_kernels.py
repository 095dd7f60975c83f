"""Rotary embeddings: the factors of a launch, and the rotation of q and k, with or without storing K and V.

Products and sums are float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import attention_metadata, tile_sizes


def rotary(positions: Tensor, inv_freq: Tensor, axis: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Writes cos and sin of angle f of token t, ``positions[axis[f], t] * inv_freq[f]``; both halves are equal.

    Three axes of positions are M-RoPE; one axis number for all frequencies is plain rotary.

    Args:
        positions: int32 [axes, tokens], any strides.
        inv_freq: float32 [d / 2].
        axis: int64 [d / 2].
        cos, sin: float32 [tokens, d], contiguous: written.
    """
    tokens, d = cos.shape
    assert positions.shape[1] == tokens and inv_freq.shape == axis.shape == (d // 2,)
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape
    rotary_kernel[(tokens,)](
        cos, sin, positions, inv_freq, axis, *positions.stride(),
        HALF=d // 2, LANES=tile_sizes.power(d // 2), num_warps=1,
    )  # fmt: skip


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_map: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Rotates q into ``out`` and k into the cache, and stores v, in one kernel.

    Args:
        q, k, v: [tokens, heads or kv_heads, d], the last two dimensions contiguous.
        cos, sin: float32 [tokens, d].
        k_cache, v_cache: [blocks, block_size, kv_heads, d], contiguous.
        slot_map: int64 [tokens] block * block_size + offset.
        out: like q, the last two dimensions contiguous; q itself may be given.
    """
    attention_metadata.check_rope(q, k, cos, sin, out)
    assert v.shape == k.shape and v.stride()[1:] == k.stride()[1:] and slot_map.shape == q.shape[:1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert k_cache.shape[2:] == k.shape[1:] and k_cache.dtype == v_cache.dtype == q.dtype
    d, heads, groups = q.shape[2], q.shape[1], k.shape[1]
    rope_kernel[(q.shape[0],)](
        out, k_cache, q, k, cos, sin, slot_map, v_cache, v,
        HEADS=heads, GROUPS=groups, D=d, HALF_LANES=tile_sizes.power(d // 2), LANES=tile_sizes.lanes(d),
        HEAD_LANES=tile_sizes.power(heads), GROUP_LANES=tile_sizes.power(groups), Q_TOKEN=q.stride(0),
        K_TOKEN=k.stride(0),
        V_TOKEN=v.stride(0), OUT_TOKEN=out.stride(0), K_OUT_TOKEN=groups * d, STORE=True, num_warps=4,
    )  # fmt: skip


def rope_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor) -> None:
    """Rotates q and k [slots, heads, d] into ``q_out`` and ``k_out``; each may be its own input."""
    attention_metadata.check_rope(q, k, cos, sin, q_out)
    assert k_out.shape == k.shape and k_out.stride()[1:] == k.stride()[1:]
    d, heads, groups = q.shape[2], q.shape[1], k.shape[1]
    rope_kernel[(q.shape[0],)](
        q_out, k_out, q, k, cos, sin, cos, k_out, k,
        HEADS=heads, GROUPS=groups, D=d, HALF_LANES=tile_sizes.power(d // 2), LANES=tile_sizes.lanes(d),
        HEAD_LANES=tile_sizes.power(heads), GROUP_LANES=tile_sizes.power(groups),
        Q_TOKEN=q.stride(0), K_TOKEN=k.stride(0), V_TOKEN=0, OUT_TOKEN=q_out.stride(0), K_OUT_TOKEN=k_out.stride(0),
        STORE=False, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["axis_stride", "token_stride"])
def rotary_kernel(
    cos, sin, positions, inv_freq, axis, axis_stride, token_stride, HALF: tl.constexpr, LANES: tl.constexpr
):
    token = tl.program_id(0)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    which = tl.load(axis + lane, mask=inside, other=0).to(tl.int32)
    position = tl.load(positions + which * axis_stride + token * token_stride, mask=inside, other=0)
    angle = position.to(tl.float32) * tl.load(inv_freq + lane, mask=inside, other=0.0)
    at = token * 2 * HALF + lane
    cosine, sine = tl.cos(angle), tl.sin(angle)
    tl.store(cos + at, cosine, mask=inside)
    tl.store(cos + at + HALF, cosine, mask=inside)
    tl.store(sin + at, sine, mask=inside)
    tl.store(sin + at + HALF, sine, mask=inside)


@triton.jit
def rotate(to, source, cos, sin, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Rotates all heads of one token: (a, b) -> (a cos - b sin, b cos + a sin) over both halves. Reads before it
    writes.
    """
    HALF: tl.constexpr = D // 2
    dim = tl.arange(0, LANES)
    head = tl.arange(0, ROWS)
    inside = (head < HEADS)[:, None] & (dim < HALF)[None, :]
    at = head[:, None] * D + dim[None, :]
    a = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + dim, mask=dim < HALF, other=0.0)[None, :]
    s = tl.load(sin + dim, mask=dim < HALF, other=0.0)[None, :]
    tl.store(to + at, (a * c - b * s).to(to.dtype.element_ty), mask=inside)
    tl.store(to + at + HALF, (b * c + a * s).to(to.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q_out, k_out, q, k, cos, sin, slot_map, v_out, v,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, HALF_LANES: tl.constexpr, LANES: tl.constexpr,
    HEAD_LANES: tl.constexpr, GROUP_LANES: tl.constexpr, Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr, OUT_TOKEN: tl.constexpr, K_OUT_TOKEN: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Rotates one token. STORE: k and v are stored in its cache slot; else k goes to the same token of ``k_out``."""
    token = tl.program_id(0).to(tl.int64)
    cos += token * D
    sin += token * D
    slot = token
    if STORE:
        slot = tl.load(slot_map + token)
    rotate(q_out + token * OUT_TOKEN, q + token * Q_TOKEN, cos, sin, HEADS, D, HEAD_LANES, HALF_LANES)
    rotate(k_out + slot * K_OUT_TOKEN, k + token * K_TOKEN, cos, sin, GROUPS, D, GROUP_LANES, HALF_LANES)
    if STORE:
        dim = tl.arange(0, LANES)
        group = tl.arange(0, GROUP_LANES)
        inside = (group < GROUPS)[:, None] & (dim < D)[None, :]
        at = group[:, None] * D + dim[None, :]
        values = tl.load(v + token * V_TOKEN + at, mask=inside, other=0.0)
        tl.store(v_out + slot * K_OUT_TOKEN + at, values, mask=inside)
