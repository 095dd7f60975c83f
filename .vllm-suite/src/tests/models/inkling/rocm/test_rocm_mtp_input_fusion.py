# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ROCm numerical-equivalence tests for the fused MTP depth-layer input kernel.

``embed_dual_rmsnorm_cat`` must match the unfused module sequence numerically:
each rmsnorm computes in fp32 and rounds to bf16 at the same points as the
vendored ``rmsnorm`` kernel (including the bf16 round-trip between the
chained backbone embed_norm and the depth embed_norm), and the fused row
gather matches ``F.embedding``.
"""

from typing import cast

import pytest
import torch

from vllm.models.inkling.amd.ops.norm import (
    embed_dual_rmsnorm_cat,
    embed_rmsnorm,
    rmsnorm,
)

EPS = 1e-6
VOCAB = 4096
BF16_ATOL = torch.finfo(torch.bfloat16).eps


def _assert_bf16_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Different Triton reduction schedules can move a small number of outputs
    # by one bf16 epsilon while remaining numerically equivalent.
    torch.testing.assert_close(actual, expected, rtol=0, atol=BF16_ATOL)


def _ref(hidden, w_h, w_e, emb, w_pre=None):
    if w_pre is not None:
        emb = rmsnorm(emb, w_pre, EPS)
    return torch.cat([rmsnorm(hidden, w_h, EPS), rmsnorm(emb, w_e, EPS)], dim=-1)


@pytest.mark.parametrize("n", [1536, 6144])
@pytest.mark.parametrize("t", [0, 1, 7, 256])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embed_dual_rmsnorm_cat(n: int, t: int, ids_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dev = "cuda"
    table = (torch.randn(VOCAB, n, device=dev) * 0.3).to(torch.bfloat16)
    w_h = torch.randn(n, device=dev).to(torch.bfloat16)
    w_e = (1 + 0.01 * torch.randn(n, device=dev)).to(torch.bfloat16)
    w_pre = torch.randn(n, device=dev).to(torch.bfloat16)
    ids = torch.randint(0, VOCAB, (t,), device=dev, dtype=ids_dtype)
    hidden = (torch.randn(t, n, device=dev) * 2).to(torch.bfloat16)
    emb = table[ids.long()]

    # Fused gather + chained backbone pre-norm (the decode draft-step path).
    out = embed_dual_rmsnorm_cat(
        hidden,
        w_h,
        w_e,
        EPS,
        input_ids=ids,
        embed_table=table,
        pre_norm_weight=w_pre,
    )
    assert out.shape == (t, 2 * n)
    _assert_bf16_close(out, _ref(hidden, w_h, w_e, emb, w_pre))

    # Precomputed embeds, no pre-norm (draft prefill with target-merged MM
    # embeddings, already backbone-normed).
    out = embed_dual_rmsnorm_cat(hidden, w_h, w_e, EPS, embeds=emb)
    _assert_bf16_close(out, _ref(hidden, w_h, w_e, emb))

    # Fused gather, no pre-norm (use_embed_norm=False).
    out = embed_dual_rmsnorm_cat(
        hidden, w_h, w_e, EPS, input_ids=ids, embed_table=table
    )
    _assert_bf16_close(out, _ref(hidden, w_h, w_e, emb))


@pytest.mark.parametrize("n", [1536, 6144])
@pytest.mark.parametrize("t", [0, 1, 7, 256])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embed_rmsnorm(n: int, t: int, ids_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dev = "cuda"
    table = (torch.randn(VOCAB, n, device=dev) * 0.3).to(torch.bfloat16)
    w = torch.randn(n, device=dev).to(torch.bfloat16)
    ids = torch.randint(0, VOCAB, (t,), device=dev, dtype=ids_dtype)
    ref_emb = table[ids.long()]

    # Gather + embed_norm (base model / MTP prefill embed path).
    out = cast(torch.Tensor, embed_rmsnorm(ids, table, w, EPS))
    assert out.shape == (t, n)
    _assert_bf16_close(out, rmsnorm(ref_emb, w, EPS) if t else ref_emb)

    # Pure gather (use_embed_norm=False / replicated module forward).
    out = cast(torch.Tensor, embed_rmsnorm(ids, table, None, EPS))
    assert torch.equal(out, ref_emb)

    # Chained first-layer attn_norm (the target text-path forward): one launch
    # emits both the residual and layer 0's normed attention input.
    w_chain = (1 + 0.05 * torch.randn(n, device=dev)).to(torch.bfloat16)
    res, attn_in = cast(
        tuple[torch.Tensor, torch.Tensor],
        embed_rmsnorm(ids, table, w, EPS, chain_weight=w_chain),
    )
    ref_res = rmsnorm(ref_emb, w, EPS) if t else ref_emb
    _assert_bf16_close(res, ref_res)
    _assert_bf16_close(attn_in, rmsnorm(ref_res, w_chain, EPS) if t else ref_res)

    # Chained without embed_norm (use_embed_norm=False).
    res, attn_in = cast(
        tuple[torch.Tensor, torch.Tensor],
        embed_rmsnorm(ids, table, None, EPS, chain_weight=w_chain),
    )
    assert torch.equal(res, ref_emb)
    _assert_bf16_close(attn_in, rmsnorm(ref_emb, w_chain, EPS) if t else ref_emb)
