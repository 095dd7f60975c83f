# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Octave HIP kernels against the PyTorch reference in
vllm/v1/attention/ops/rocm_octave.py."""

import math

import pytest
import torch

from tests.v1.attention.utils import dense_kv_cache_views
from vllm.platforms import current_platform
from vllm.v1.attention.backends.rocm_octave_attn import RocmOctaveAttentionBackend
from vllm.v1.attention.ops import rocm_octave as sq
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode


def _arch() -> str | None:
    if not current_platform.is_rocm():
        return None
    from vllm.platforms.rocm import get_cdna_version, get_rdna_version

    if get_rdna_version() == 3:
        return "rdna3"
    return "cdna3" if get_cdna_version() == 3 else None


pytestmark = pytest.mark.skipif(
    _arch() is None or not hasattr(torch.ops._C, "octave_decode"),
    reason="Octave kernels need RDNA3 or CDNA3",
)

HEAD, ROPE, BLOCK = 256, 64, 16
CACHE_DTYPES = ["octave_k3v4", "octave_k3v3", "octave_k3v3_compact"]


def _format(cache_dtype: str) -> sq.OctaveFormat:
    return sq.OctaveFormat.from_cache_dtype(cache_dtype, HEAD, ROPE)


def _rel(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def _token_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(blocks, H, block_size, slot) cache -> (T, H, slot) for flat slots."""
    flat = cache.permute(0, 2, 1, 3).reshape(-1, cache.shape[1], cache.shape[3])
    return flat[slots]


def _fill(cache, block_ids, k, v, k_signs, v_signs, fmt):
    n = k.shape[0]
    slots = (
        block_ids.long().repeat_interleave(BLOCK)[:n] * BLOCK
        + torch.arange(n, device=k.device) % BLOCK
    )
    torch.ops._C.octave_cache_store(
        k, v, cache, slots, k_signs, v_signs, fmt.kernel_code
    )
    return slots


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_store_matches_reference(cache_dtype):
    torch.manual_seed(0)
    dev, fmt = "cuda", _format(cache_dtype)
    ksg = vsg = sq.sign_bits(HEAD).to(dev)
    t, hkv = 1024, 2
    k = torch.randn(t, hkv, HEAD, device=dev)
    k[..., 100] *= 8  # an outlier channel is spread by the rotation
    k = k.bfloat16()
    v = torch.randn(t, hkv, HEAD, device=dev).bfloat16()
    nblk = t // BLOCK + 4
    cache = torch.zeros(nblk, hkv, BLOCK, fmt.slot_bytes, dtype=torch.uint8, device=dev)
    slots = _fill(cache, torch.randperm(nblk, device=dev), k, v, ksg, vsg, fmt)

    k_got, v_got = sq.reference_dequantize(_token_slots(cache, slots), fmt)
    ref = sq.reference_quantize(k.float(), v.float(), fmt)
    k_ref, v_ref = sq.reference_dequantize(ref, fmt)
    # Same codes up to rounding ties from a different summation order.
    assert _rel(k_got, k_ref) < 1e-2 and _rel(v_got, v_ref) < 1e-2
    # Lloyd-Max on Gaussian data: 3-bit codes (4-bit for block K's RoPE
    # block) keep ~19% of the norm as error, 4-bit ~10%.
    assert _rel(k_got, k) < 0.2
    assert _rel(v_got, v) < (0.12 if fmt.v_bits == 4 else 0.22)


@pytest.mark.parametrize(
    "cache_dtype,slot_bytes",
    [("octave_k3v4", 248), ("octave_k3v3", 216), ("octave_k3v3_compact", 196)],
)
def test_slot_bytes_match_kernel_layout(cache_dtype, slot_bytes):
    """The cache is sized from the Python format; the kernels index it with
    octave::Format in csrc/attention/octave_format.cuh."""
    assert _format(cache_dtype).slot_bytes == slot_bytes


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_store_skips_padding_slots(cache_dtype):
    """Tokens with slot -1 (cudagraph padding) leave every byte unchanged."""
    torch.manual_seed(0)
    dev, fmt = "cuda", _format(cache_dtype)
    ksg = vsg = sq.sign_bits(HEAD).to(dev)
    t, hkv = 8, 2
    k = torch.randn(t, hkv, HEAD, device=dev).bfloat16()
    v = torch.randn(t, hkv, HEAD, device=dev).bfloat16()
    cache = torch.randint(
        0, 256, (2, hkv, BLOCK, fmt.slot_bytes), dtype=torch.uint8, device=dev
    )
    before = cache.clone()
    slots = torch.full((t,), -1, dtype=torch.long, device=dev)
    slots[3] = 21
    torch.ops._C.octave_cache_store(k, v, cache, slots, ksg, vsg, fmt.kernel_code)
    written = torch.zeros_like(cache, dtype=torch.bool)
    written[1, :, 5] = True
    assert torch.equal(cache[~written], before[~written])
    assert not torch.equal(cache[written], before[written])


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("query_group", [1, 4])
@pytest.mark.parametrize("num_splits", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("use_wmma", [True, False])
def test_decode_matches_reference(
    cache_dtype, query_group, num_splits, dtype, use_wmma
):
    """Covers MTP verification: up to 4 consecutive query tokens per request,
    each with its own causal length, plus a padded query with no request.
    ``use_wmma=False`` forces the portable kernel every architecture runs."""
    torch.manual_seed(1)
    dev, fmt = "cuda", _format(cache_dtype)
    ksg = vsg = sq.sign_bits(HEAD).to(dev)
    hkv, group = 1, 6
    lens = [1, 16, 37, 700, 3000]
    cache = torch.zeros(512, hkv, BLOCK, fmt.slot_bytes, dtype=torch.uint8, device=dev)
    max_blocks = max(math.ceil(n / BLOCK) for n in lens)
    block_table = torch.zeros(len(lens), max_blocks, dtype=torch.int32, device=dev)
    free = torch.randperm(512, device=dev)
    q_to_req, q_to_klen, used = [], [], 0
    for i, n in enumerate(lens):
        nb = math.ceil(n / BLOCK)
        block_table[i, :nb] = free[used : used + nb].int()
        used += nb
        k = torch.randn(n, hkv, HEAD, device=dev).bfloat16()
        v = torch.randn(n, hkv, HEAD, device=dev).bfloat16()
        _fill(cache, block_table[i, :nb], k, v, ksg, vsg, fmt)
        nq = min(query_group, n)
        for j in range(nq):
            q_to_req.append(i)
            q_to_klen.append(n - nq + 1 + j)
    q_to_req.append(len(lens) + 3)  # cudagraph padding: no request
    q_to_klen.append(0)
    q_to_req = torch.tensor(q_to_req, dtype=torch.int32, device=dev)
    q_to_klen = torch.tensor(q_to_klen, dtype=torch.int32, device=dev)

    num_q = q_to_req.numel()
    q = (torch.randn(num_q, hkv * group, HEAD, device=dev) * 2).to(dtype)
    out = torch.zeros_like(q)
    mid = torch.empty(
        num_q, hkv * group, num_splits, HEAD + 2, dtype=torch.float32, device=dev
    )
    torch.ops._C.octave_decode(
        out,
        q,
        cache,
        block_table,
        q_to_req,
        q_to_klen,
        mid,
        ksg,
        vsg,
        1 / 16,
        num_splits,
        fmt.kernel_code,
        query_group,
        use_wmma,
    )
    ref = sq.reference_attention(
        q.float(),
        cache,
        block_table,
        q_to_req.clamp(max=len(lens) - 1),
        q_to_klen,
        fmt,
        1 / 16,
    )
    # Only the kernel's query precision (fp16 or int8) differs.
    assert _rel(out[:-1], ref[:-1]) < 2e-2
    assert out[-1].abs().max().item() == 0


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("query_lens", [[300], [129, 1, 517]])
def test_prefill_matches_reference(cache_dtype, query_lens):
    """Chunked prefill: each request's chunk attends causally to itself
    (unquantized K/V) and to its cached prefix (packed cache), in the rotated
    space the backend runs it in."""
    torch.manual_seed(3)
    dev, fmt = "cuda", _format(cache_dtype)
    ksg = vsg = sq.sign_bits(HEAD).to(dev)
    hkv, group = 1, 6
    ctx_lens = [2500, 0, 4100][: len(query_lens)]
    seq_lens = [c + n for c, n in zip(ctx_lens, query_lens)]
    max_blocks = max(math.ceil(n / BLOCK) for n in seq_lens)
    nblk = sum(math.ceil(n / BLOCK) for n in seq_lens) + 8
    cache = torch.zeros(nblk, hkv, BLOCK, fmt.slot_bytes, dtype=torch.uint8, device=dev)
    block_table = torch.zeros(len(seq_lens), max_blocks, dtype=torch.int32, device=dev)
    free, used = torch.randperm(nblk, device=dev), 0
    ks, vs = [], []
    for i, n in enumerate(seq_lens):
        nb = math.ceil(n / BLOCK)
        block_table[i, :nb] = free[used : used + nb].int()
        used += nb
        k = torch.randn(n, hkv, HEAD, device=dev).half()
        v = torch.randn(n, hkv, HEAD, device=dev).half()
        _fill(cache, block_table[i, :nb], k, v, ksg, vsg, fmt)
        ks.append(k)
        vs.append(v)

    qsl = torch.tensor([0, *query_lens], device=dev).cumsum(0).int()
    total = int(qsl[-1])
    q = (torch.randn(total, hkv * group, HEAD, device=dev) * 2).half()
    k_new = torch.cat([k[c:] for k, c in zip(ks, ctx_lens)])
    v_new = torch.cat([v[c:] for v, c in zip(vs, ctx_lens)])
    q_rot, k_rot, v_rot = q.clone(), k_new.clone(), v_new.clone()
    torch.ops._C.octave_rotate(q_rot, ksg, not fmt.compact, False)
    torch.ops._C.octave_rotate(k_rot, ksg, not fmt.compact, False)
    torch.ops._C.octave_rotate(v_rot, vsg, False, False)
    out = torch.empty_like(q_rot)
    torch.ops._C.octave_prefill(
        out,
        q_rot,
        k_rot,
        v_rot,
        cache,
        block_table,
        qsl,
        torch.tensor(seq_lens, dtype=torch.int32, device=dev),
        max(query_lens),
        1 / 16,
        fmt.kernel_code,
    )
    torch.ops._C.octave_rotate(out, vsg, False, True)

    ref = torch.empty(total, hkv * group, HEAD, device=dev)
    for i, (c, n) in enumerate(zip(ctx_lens, query_lens)):
        k_all, v_all = ks[i][c:].float(), vs[i][c:].float()
        if c > 0:
            pos = torch.arange(c, device=dev)
            slots = cache[block_table[i, pos // BLOCK].long(), :, pos % BLOCK]
            k_pre, v_pre = sq.reference_dequantize(slots, fmt)
            k_all, v_all = torch.cat([k_pre, k_all]), torch.cat([v_pre, v_all])
        k_all = k_all.repeat_interleave(group, 1)
        v_all = v_all.repeat_interleave(group, 1)
        qi = q[int(qsl[i]) : int(qsl[i + 1])].float()
        s = torch.einsum("qhd,thd->hqt", qi, k_all) / 16
        mask = (
            torch.arange(c + n, device=dev)[None]
            > (c + torch.arange(n, device=dev))[:, None]
        )
        p = torch.softmax(s.masked_fill(mask, float("-inf")), -1)
        ref[int(qsl[i]) : int(qsl[i + 1])] = torch.einsum("hqt,thd->qhd", p, v_all)
    # Only the kernel's int8 query and fp16 P/V rounding differ.
    assert _rel(out, ref) < 2e-2


def _decode(cache, q, block_table, q_to_req, q_to_klen, signs, fmt, use_wmma):
    out = torch.zeros_like(q)
    mid = torch.empty(*q.shape[:2], 8, HEAD + 2, dtype=torch.float32, device=q.device)
    torch.ops._C.octave_decode(
        out,
        q,
        cache,
        block_table,
        q_to_req,
        q_to_klen,
        mid,
        signs,
        signs,
        1 / 16,
        8,
        fmt.kernel_code,
        1,
        use_wmma,
    )
    return out


def _prefill(cache, q, k, v, block_table, qsl, seq_lens, signs, fmt):
    out = torch.empty_like(q)
    torch.ops._C.octave_prefill(
        out,
        q,
        k,
        v,
        cache,
        block_table,
        qsl,
        seq_lens,
        int((qsl[1:] - qsl[:-1]).max()),
        1 / 16,
        fmt.kernel_code,
    )
    return out


@pytest.mark.parametrize(
    "layout", RocmOctaveAttentionBackend.supported_kv_cache_layouts()
)
def test_kernels_follow_declared_cache_layouts(layout):
    """Store, decode and prefill on the cache view vLLM allocates for each
    declared layout match a contiguous cache bit for bit. Two KV heads, so the
    head and token strides differ between layouts."""
    torch.manual_seed(4)
    dev, cache_dtype = "cuda", "octave_k3v3"
    fmt, hkv, group, nblk = _format(cache_dtype), 2, 6, 80
    signs = sq.sign_bits(HEAD).to(dev)
    sq.register_rope_dim(HEAD, ROPE)
    spec = RocmOctaveAttentionBackend.customize_spec(
        FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=hkv,
            head_size=HEAD,
            dtype=torch.uint8,
            kv_quant_mode=get_kv_quant_mode(cache_dtype),
        )
    )
    raw = torch.zeros(nblk * spec.page_size_bytes, dtype=torch.int8, device=dev)
    cache = dense_kv_cache_views(raw, spec, nblk, 1, layout)[0]
    dense = torch.zeros(nblk, hkv, BLOCK, fmt.slot_bytes, dtype=torch.uint8, device=dev)
    assert cache.shape == dense.shape and cache.dtype == dense.dtype

    seq_lens, query_lens = [700, 300], [100, 300]
    max_blocks = max(math.ceil(n / BLOCK) for n in seq_lens)
    block_table = torch.zeros(len(seq_lens), max_blocks, dtype=torch.int32, device=dev)
    free, used, ks, vs = torch.randperm(nblk, device=dev), 0, [], []
    for i, n in enumerate(seq_lens):
        nb = math.ceil(n / BLOCK)
        block_table[i, :nb] = free[used : used + nb].int()
        used += nb
        ks.append(torch.randn(n, hkv, HEAD, device=dev).half())
        vs.append(torch.randn(n, hkv, HEAD, device=dev).half())
        for c in (cache, dense):
            _fill(c, block_table[i, :nb], ks[i], vs[i], signs, signs, fmt)
    assert torch.equal(cache, dense)

    q_to_req = torch.arange(len(seq_lens), dtype=torch.int32, device=dev)
    q_to_klen = torch.tensor(seq_lens, dtype=torch.int32, device=dev)
    q = torch.randn(len(seq_lens), hkv * group, HEAD, device=dev).half()
    for use_wmma in (True, False):
        out, ref = (
            _decode(c, q, block_table, q_to_req, q_to_klen, signs, fmt, use_wmma)
            for c in (cache, dense)
        )
        assert out.abs().sum() > 0
        assert torch.equal(out, ref)

    qsl = torch.tensor([0, *query_lens], device=dev).cumsum(0).int()
    q = torch.randn(int(qsl[-1]), hkv * group, HEAD, device=dev).half()
    ctx = [n - m for n, m in zip(seq_lens, query_lens)]
    k = torch.cat([x[c:] for x, c in zip(ks, ctx)])
    v = torch.cat([x[c:] for x, c in zip(vs, ctx)])
    out, ref = (
        _prefill(c, q, k, v, block_table, qsl, q_to_klen, signs, fmt)
        for c in (cache, dense)
    )
    assert torch.equal(out, ref)


def _window_tables(entries, hkv, dev):
    return (
        torch.zeros(entries, hkv, 2 * HEAD, dtype=torch.float16, device=dev),
        torch.full((entries,), -1, dtype=torch.int32, device=dev),
        torch.zeros(entries, dtype=torch.int32, device=dev),
    )


@pytest.mark.skipif(_arch() != "rdna3", reason="sparse decode is RDNA3-only")
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("hkv,group", [(1, 6), (2, 6)])
@pytest.mark.parametrize("window", ["off", "on", "evicted"])
def test_sparse_decode_matches_reference(cache_dtype, hkv, group, window):
    """Sparse (top-k) decode as qwen4_exp QSA runs it: each query reads the
    logical positions in its index row, -1 entries are holes. With the window
    on, the first 4 and the last 64 positions come from the fp16 tables;
    an entry whose tag was overwritten falls back to the packed cache."""
    torch.manual_seed(4)
    dev, fmt = "cuda", _format(cache_dtype)
    signs = sq.sign_bits(HEAD).to(dev)
    lens, max_blocks, nblk = [1500, 2600, 777], 192, 1024
    cache = torch.zeros(nblk, hkv, BLOCK, fmt.slot_bytes, dtype=torch.uint8, device=dev)
    block_table = (
        torch.randperm(nblk, device=dev)[: len(lens) * max_blocks]
        .view(len(lens), max_blocks)
        .int()
    )
    wtab, wtags, wlocks = _window_tables(4096, hkv, dev)
    stab, stags, slocks = _window_tables(256, hkv, dev)
    ks, vs = [], []
    for r, n in enumerate(lens):
        k = torch.randn(n, hkv, HEAD, device=dev).half()
        v = torch.randn_like(k)
        pos = torch.arange(n, device=dev)
        slots = block_table[r, pos // BLOCK].long() * BLOCK + pos % BLOCK
        torch.ops._C.octave_cache_store(
            k, v, cache, slots, signs, signs, fmt.kernel_code
        )
        torch.ops._C.octave_window_store(
            k, v, slots, pos.int(), wtab, wtags, wlocks, stab, stags, slocks
        )
        ks.append(k)
        vs.append(v)
    if window == "evicted":
        wtags[::2] = -7
        stags[::2] = -7

    q_to_req = torch.tensor([0, 1, 1, 2, 0, 1, 2], dtype=torch.int32, device=dev)
    num_q, topk = q_to_req.numel(), 512
    qpos = torch.tensor(
        [lens[r] - 1 - 37 * i for i, r in enumerate(q_to_req.tolist())],
        dtype=torch.int32,
        device=dev,
    )
    indices = torch.full((num_q, topk), -1, dtype=torch.int32, device=dev)
    for i in range(num_q):
        n = int(qpos[i]) + 1
        cand = torch.cat(
            [
                torch.arange(max(0, n - 80), n, device=dev),
                torch.arange(4, device=dev),
                torch.randperm(n, device=dev)[:300],
            ]
        ).unique()
        indices[i, : cand.numel()] = cand.int()
        indices[i] = indices[i][torch.randperm(topk, device=dev)]

    q = torch.randn(num_q, hkv * group, HEAD, device=dev).half()
    out = torch.empty_like(q)
    mid = torch.empty(num_q, hkv * group, 64, HEAD + 2, dtype=torch.float32, device=dev)
    scale = HEAD**-0.5
    window_args = () if window == "off" else (qpos, wtab, wtags, stab, stags)
    torch.ops._C.octave_decode_sparse(
        out,
        q,
        cache,
        block_table,
        q_to_req,
        indices,
        mid,
        signs,
        signs,
        scale,
        64,
        fmt.kernel_code,
        *window_args,
    )

    ref = torch.zeros(num_q, hkv * group, HEAD, device=dev)
    for i in range(num_q):
        r, p = int(q_to_req[i]), int(qpos[i])
        sel = indices[i][indices[i] >= 0].long()
        blocks = block_table[r, sel // BLOCK].long()
        k, v = sq.reference_dequantize(cache[blocks, :, sel % BLOCK], fmt)
        if window != "off":
            slot = blocks * BLOCK + sel % BLOCK
            exact = ((p - sel) < 64) & (wtags[slot % 4096].long() == slot)
            exact |= (sel < 4) & (stags[slot % 256].long() == slot)
            k[exact] = ks[r][sel[exact]].float()
            v[exact] = vs[r][sel[exact]].float()
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        p_attn = torch.softmax(torch.einsum("hd,thd->ht", q[i].float(), k) * scale, -1)
        ref[i] = torch.einsum("ht,thd->hd", p_attn, v)
    assert _rel(out, ref) < 2e-2
