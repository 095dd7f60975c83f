"""The 8-bit KV cache (core/models/kv_cache_quantisation.py) on a card: storing codes, and the attention loop over them.

Codes of fp8 are stored as uint8. Shifted into float16 they are exact up to a factor of 256, which the scale absorbs:
that also works below sm_89, for which the compiler has no fp8 type, and for subnormal codes. A key's scale multiplies
its scores; values are scaled before they are rounded, since their scales may be as small as float16 gets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import online_softmax, tile_sizes
from trencadis.backends.cuda.kernels.paged_attention_loop import RunningAttention, ids_of, slots_of
from trencadis.core.device.backend import LayerKV
from trencadis.core.kv_cache_format import FP8, INT8, LEAST_SCALES, TOPS

FORMS = {torch.int8: 1, torch.uint8: 2}
"""Dtype of codes -> its number in the kernels; 0: a 16- or 32-bit cache."""

E4M3: tl.constexpr = tl.constexpr(2)
FEW: tl.constexpr = tl.constexpr(16)
"""Width of a tile of kept values: a product needs at least this many."""

SHIFTED: tl.constexpr = tl.constexpr(256.0)
NORMAL: tl.constexpr = tl.constexpr(0.015625)
"""2**-6, the smallest normal value of e4m3."""

LARGEST: tl.constexpr = tl.constexpr(65504.0)


class CodedKeys(NamedTuple):
    """The scales and kept (uncoded) values of one KV head."""

    k_scale: tl.tensor  # pointer, float16 [slots, KV heads], starting at the KV head
    v_scale: tl.tensor
    kept: tl.tensor  # pointer, 16 bits [slots, KV heads, KEPT], starting at the KV head
    few: tl.tensor  # [M, FEW]: the queries' values at the kept positions


class CodeTensors(NamedTuple):
    """The tensors of a cache of codes beside its keys and values (``LayerKV``)."""

    k_scale: Tensor
    v_scale: Tensor
    kept: Tensor
    pairs: Tensor


def pointers(kv: LayerKV) -> CodeTensors:
    """Returns a cache's further tensors; one that the cache lacks is replaced by one that is never read."""
    code_params = (kv.k_scale, kv.v_scale, kv.kept, kv.pairs)
    return CodeTensors(*(kv.k if t is None else t for t in code_params))


def constants(kv: LayerKV) -> dict[str, int]:
    """Returns the kernel constants FORM and KEPT of a cache."""
    coded = kv.k_scale is not None
    return {"FORM": FORMS[kv.k.dtype] if coded else 0, "KEPT": kv.kept.shape[-1] if kv.kept is not None else 0}


def store(k: Tensor, v: Tensor, kv: LayerKV, slot_map: Tensor) -> None:
    """Rounds rotated keys and values [tokens, KV heads, d] to codes and stores them at slots of the cache.

    Args:
        k, v: the last two dimensions contiguous.
        slot_map: int64 [tokens] block * block_size + offset.
    """
    tokens, groups, d = k.shape
    assert kv.k_scale is not None and kv.v_scale is not None and v.shape == k.shape
    assert k.stride()[1:] == v.stride()[1:] == (d, 1) and slot_map.shape == (tokens,)
    for t in kv[:5]:
        assert t is None or t.is_contiguous()
    name = INT8 if kv.k.dtype == torch.int8 else FP8
    codes_kernel[(tokens, 2)](
        kv.k, kv.v, *pointers(kv), kv.k if kv.static is None else kv.static, slot_map, k, v,
        GROUPS=groups, D=d, LANES=tile_sizes.lanes(d), GROUP_LANES=tile_sizes.power(groups), K_TOKEN=k.stride(0),
        V_TOKEN=v.stride(0), STATIC=kv.static is not None, TOP=TOPS[name], LEAST=LEAST_SCALES[name],
        **constants(kv), num_warps=4,
    )  # fmt: skip


@triton.jit
def codes_kernel(
    k_codes, v_codes, k_scale, v_scale, kept, pairs, static, slot_map, k, v,
    GROUPS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, GROUP_LANES: tl.constexpr, K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr, STATIC: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr, FORM: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Stores one token's keys (program 0 of the second axis) or values, of all KV heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_map + token)
    group = tl.arange(0, GROUP_LANES)
    dim = tl.arange(0, LANES)
    there = group < GROUPS
    inside = there[:, None] & (dim < D)[None, :]
    at = group[:, None] * D + dim[None, :]
    cell = slot * GROUPS + group
    if tl.program_id(1) == 0:
        x = tl.load(k + token * K_TOKEN + at, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(KEPT):
            position = tl.load(pairs + group * KEPT + j, mask=there, other=0)
            wide = tl.load(k + token * K_TOKEN + group * D + position, mask=there, other=0.0)
            if k.dtype.element_ty == tl.float32:
                wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
            tl.store(kept + cell * KEPT + j, wide.to(kept.dtype.element_ty), mask=there)
            x = tl.where(dim[None, :] == position[:, None], 0.0, x)
        units, scale = in_units(x, static, STATIC, TOP, LEAST)
        tl.store(k_codes + slot * GROUPS * D + at, encode(units, FORM), mask=inside)
        tl.store(k_scale + cell, scale, mask=there)
    else:
        x = tl.load(v + token * V_TOKEN + at, mask=inside, other=0.0).to(tl.float32)
        units, scale = in_units(x, static + 1, STATIC, TOP, LEAST)
        tl.store(v_codes + slot * GROUPS * D + at, encode(units, FORM), mask=inside)
        tl.store(v_scale + cell, scale, mask=there)


@triton.jit
def in_units(x, static, STATIC: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr):
    """Returns (x [G, LANES] in units of its scale and within the codes' range, float16 [G] scales)."""
    if STATIC:
        scale = (tl.max(x * 0.0, 1) + tl.load(static)).to(tl.float16)
    else:
        least = tl.max(tl.abs(x), 1) / TOP
        scale = tl.minimum(tl.maximum(least, LEAST), LARGEST).to(tl.float16)
    units = x / scale.to(tl.float32)[:, None]
    return tl.minimum(tl.maximum(units, -TOP), TOP), scale


@triton.jit
def encode(units, FORM: tl.constexpr):
    """Returns the codes of float32 values, rounded to nearest even: bits of a sum in which a step is the last bit."""
    if FORM == E4M3:
        bits = tl.abs(units).to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(units) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(tl.abs(units) < NORMAL, small, normal)
        return tl.where(units < 0, code | 128, code).to(tl.uint8)
    else:
        return ((units + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def decode(codes, FORM: tl.constexpr):
    """Returns the values of codes; those of fp8 are float16 and 1 / SHIFTED of the true value."""
    if FORM == E4M3:
        bits = codes.to(tl.int16)
        return (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    else:
        return codes


@triton.jit
def scales_of(scales, slots, GROUPS: tl.constexpr, inside, FORM: tl.constexpr):
    """Returns float32 [N]: the factor of the decoded values of each slot."""
    found = tl.load(scales + slots * GROUPS, mask=inside, other=0.0).to(tl.float32)
    if FORM == E4M3:
        found *= SHIFTED
    return found


@triton.jit
def few_of(at, pairs, group, live, KEPT: tl.constexpr):
    """Returns [M, FEW]: the values of queries at pointers ``at`` [M] at the kept positions of KV head ``group``."""
    lane = tl.arange(0, FEW)
    if KEPT > 0:
        position = tl.load(pairs + group * KEPT + lane, mask=lane < KEPT, other=0)
        return tl.load(at[:, None] + position[None, :], mask=live[:, None] & (lane < KEPT)[None, :], other=0.0)
    else:
        return 0


@triton.jit
def attend_codes(
    run, queries, keys, code_params, start, stop, first, last, scale, MASKED: tl.constexpr, ONCE: tl.constexpr,
    WINDOW: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, FORM: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Does the same as ``paged_attention_loop.attend_keys`` over codes; ``code_params: CodedKeys``."""
    acc, peak, total, ids = run
    dim = tl.arange(0, LANES)
    lane = tl.arange(0, FEW)
    for key in tl.range(start, stop, N, num_stages=1 if ONCE else None):
        slots = slots_of(ids, key, N, BLOCK)
        if not ONCE:
            ids = ids_of(keys.table, key + N, keys.stop, N, BLOCK)
        seen = key + tl.arange(0, N)
        there = seen < keys.stop
        stored = (dim < D)[None, :]
        keep = True
        if MASKED:
            stored = there[:, None] & stored
            keep = seen[None, :] <= last
            if WINDOW > 0:
                keep = keep & (seen[None, :] >= first)
        at = slots[:, None] * (GROUPS * D) + dim[None, :]
        k = decode(tl.load(keys.k + at, mask=stored, other=0), FORM).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        scores *= scales_of(code_params.k_scale, slots, GROUPS, there, FORM)[None, :]
        if KEPT > 0:
            at = slots[:, None] * (GROUPS * KEPT) + lane[None, :]
            kept = tl.load(code_params.kept + at, mask=there[:, None] & (lane < KEPT)[None, :], other=0.0)
            scores = tl.dot(code_params.few, tl.trans(kept.to(queries.dtype)), scores, input_precision="ieee")
        weights, fade, peak, total = online_softmax.tile_weights(peak, total, scores, keep, scale, MASKED)
        at = slots[:, None] * (GROUPS * D) + dim[None, :]
        v = decode(tl.load(keys.v + at, mask=stored, other=0), FORM).to(tl.float32)
        v = (v * scales_of(code_params.v_scale, slots, GROUPS, there, FORM)[:, None]).to(queries.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return RunningAttention(acc, peak, total, ids)


@triton.jit
def attend_coded_reach(
    run, queries, keys, code_params, reach, scale, ONCE: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, FORM: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Does the same as ``paged_attention_loop.attend_reach`` over codes; ``code_params: CodedKeys``."""
    begin, edge, whole, stop, first, last = reach
    if WINDOW > 0:
        run = attend_codes(
            run, queries, keys, code_params, begin, edge, first, last, scale, True, False, WINDOW, N, BLOCK, GROUPS, D,
            LANES, FORM, KEPT,
        )  # fmt: skip
    run = attend_codes(
        run, queries, keys, code_params, edge, whole, 0, 0, scale, False, False, WINDOW, N, BLOCK, GROUPS, D, LANES,
        FORM,
        KEPT,
    )  # fmt: skip
    return attend_codes(
        run, queries, keys, code_params, whole, stop, first, last, scale, True, ONCE, WINDOW, N, BLOCK, GROUPS, D,
        LANES,
        FORM, KEPT,
    )  # fmt: skip
