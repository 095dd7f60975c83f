# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Correctness tests for DSpark non-causal sliding-window MLA via sparse indices.

DSpark drafts a block of N tokens whose attention is NON-CAUSAL within the block:
every block token attends to the sliding window of context AND to all block
tokens (including ones at later positions than itself).

We can implement this using the existing sparse-MLA pathway by expanding the window size
to include the rest of the block tokens: instead of setting topk indices to the 127
previous tokens, we expand it to the next power of 2 (256) and include up to
swa_size + block_size - 1 topk indices, so that each query attends to the rest. The
remaining slots are filled with padding.

The sparse-MLA decode kernels (FlashMLA on SM90/SM100, FlashInfer TRTLLM on
SM100/SM120) are index-driven: each query attends over exactly the slots in its
index list, with no causal mask (see ``flash_mla_with_kvcache(..., indices=...)``
and ``_forward_decode``'s "attend only by generated indices"). The existing
``test_sparse_mla_backends`` suite already validates arbitrary index lists, but
only ones whose entries are <= the query's own position. This test suite specifically
ensures correctness of the non-causal attention case.

This reuses the harness/helpers of ``test_sparse_mla_backends.py`` (same model
shapes, fp8_ds_mla round-trip, mock indexer, MockSparseMLAAttentionLayer); only
the index construction differs.
"""

import math
from types import MethodType, SimpleNamespace

import pytest
import torch

from tests.v1.attention.test_mla_backends import (
    BatchSpec,
    MockSparseMLAAttentionLayer,
    create_and_prepopulate_kv_cache,
)
from tests.v1.attention.test_sparse_mla_backends import (
    _quantize_dequantize_fp8_ds_mla,
)
from tests.v1.attention.utils import (
    create_common_attn_metadata,
    create_standard_kv_cache_spec,
    create_vllm_config,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform

if not current_platform.is_cuda():
    pytest.skip(
        "DSpark non-causal sparse MLA tests currently only support CUDA.",
        allow_module_level=True,
    )

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseTRTLLMBackend,
)
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.ops import flashmla

DEVICE_TYPE = current_platform.device_type

# (window, block_size, topk_width). topk_width must be a multiple of the kernel's
# B_TOPK (= padded query-head count, 64 or 128); we use 128-multiples to cover
# both. The "wide" case needs window + block > 128 -> width must grow past 128.
_DSPARK_CONFIGS = {
    "small_block": (8, 4, 128),
    "full_window_block": (128, 5, 256),
}


def _build_dspark_noncausal_indices(
    seq_lens: list[int],
    query_lens: list[int],
    window: int,
    topk_width: int,
    device: torch.device,
) -> torch.Tensor:
    """Per-token sparse indices for the DSpark non-causal block.

    For a request with context length ``ctx`` and a query block of ``q_len``
    tokens (block positions ``ctx .. ctx+q_len-1``), EVERY block query attends to
    the same set: the trailing ``window`` context positions plus all block
    positions, i.e. the contiguous range ``[max(ctx-window,0) .. ctx+q_len-1]``.
    This is non-causal: an early block query's list contains later block tokens
    (future-pointing). The list is padded to ``topk_width`` with ``-1``.
    """
    total_query_tokens = sum(query_lens)
    sparse_indices = torch.full(
        (total_query_tokens, topk_width), -1, dtype=torch.int32, device=device
    )
    gt = 0
    for s_len, q_len in zip(seq_lens, query_lens):
        ctx_len = s_len - q_len
        lo = max(ctx_len - window, 0)
        hi = ctx_len + q_len  # exclusive: window context + the full block
        idx_list = torch.arange(lo, hi, dtype=torch.int32, device=device)
        n = idx_list.numel()
        assert n <= topk_width, (
            f"index list ({n}) exceeds aligned topk width ({topk_width})"
        )
        for _ in range(q_len):
            sparse_indices[gt, :n] = idx_list
            gt += 1
    return sparse_indices


def _run_sparse_backend_vs_sdpa(
    backend_cls,
    seq_lens: list[int],
    query_lens: list[int],
    sparse_indices: torch.Tensor,
    kv_cache_dtype: str,
    block_size: int,
    num_heads: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force_future_dominance: bool = False,
    qk_nope_head_dim: int = 128,
    v_head_dim: int = 128,
    stale_cpu_query_lens: list[int] | None = None,
    capture_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a sparse-MLA backend with the given per-token indices and compute a
    dense per-token SDPA reference over the SAME indices.

    Mirrors ``test_sparse_mla_backends.test_sparse_backend_decode_correctness``
    but with externally-supplied (non-causal) ``sparse_indices``.

    ``num_heads`` selects the kernel's B_TOPK (= padded q-head count): 128 -> 128,
    64 -> 64. The aligned widths (128/256) are multiples of both, so num_heads=64
    exercises the head64 decode path that the SM100 alignment assert guards.

    ``force_future_dominance`` scales the LAST block token's latent KV so it
    dominates the softmax for every query that attends to it. With random data the
    few future block tokens carry negligible attention mass (especially with a wide
    window), so causal and non-causal outputs coincide; this knob makes the
    future-token contribution provably large for the differentiation test. It is
    OFF for the correctness test (which needs sensitivity to all tokens).

    Returns (backend_output, noncausal_reference, causal_reference). The causal
    reference restricts each query to indices <= its own absolute position.
    """
    batch_spec = BatchSpec(seq_lens=seq_lens, query_lens=query_lens)
    topk_tokens = sparse_indices.shape[1]
    dtype = torch.bfloat16
    use_fp8_ds_mla_quantization = kv_cache_dtype == "fp8_ds_mla"

    kv_lora_rank = 512
    qk_rope_head_dim = 64
    head_size = kv_lora_rank + qk_rope_head_dim

    max_seqlen = max(seq_lens)
    total_cache_tokens = sum(seq_lens)

    vllm_config = create_vllm_config(
        model_name="deepseek-ai/DeepSeek-V2-Lite-Chat",
        tensor_parallel_size=1,
        max_model_len=max_seqlen,
        num_gpu_blocks=max(2048, cdiv(total_cache_tokens, block_size) + 1),
        block_size=block_size,
        hf_config_override={
            "index_topk": topk_tokens,
            "attn_module_list_cfg": [{"topk_tokens": topk_tokens}],
        },
    )
    model_config = vllm_config.model_config
    model_config.hf_text_config = SimpleNamespace(
        index_topk=topk_tokens,
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=v_head_dim,
        model_type="deepseek_v2",
    )
    del model_config.hf_config.index_topk  # Composite configs only nest this field.
    model_config.dtype = dtype
    monkeypatch.setattr(
        model_config,
        "get_num_attention_heads",
        MethodType(lambda self, parallel_config: num_heads, model_config),
    )
    monkeypatch.setattr(
        model_config,
        "get_num_kv_heads",
        MethodType(lambda self, parallel_config: 1, model_config),
    )
    monkeypatch.setattr(
        model_config, "get_head_size", MethodType(lambda self: head_size, model_config)
    )
    monkeypatch.setattr(
        model_config, "get_sliding_window", MethodType(lambda self: None, model_config)
    )

    kv_cache_spec = create_standard_kv_cache_spec(vllm_config)

    torch.manual_seed(0)
    scale = 1.0 / math.sqrt(head_size)

    # Shared MLA projection weights, used by both reference and backend.
    W_UK = torch.rand(
        kv_lora_rank, num_heads, qk_nope_head_dim, dtype=dtype, device=device
    )
    W_UV = torch.rand(kv_lora_rank, num_heads, v_head_dim, dtype=dtype, device=device)

    all_q_vllm, all_kv_c_vllm, all_k_pe_vllm = [], [], []
    kv_c_contexts, k_pe_contexts = [], []
    reference_outputs = []
    # Causal counterpart of the reference: same index lists, but each query is
    # restricted to indices <= its own absolute position (drops future-pointing
    # block tokens). Used to prove the non-causal result is genuinely different.
    causal_reference_outputs = []

    kv_cache_scale = torch.tensor(1.0, dtype=torch.float32, device=device)
    global_token_idx = 0

    for s_len, q_len in zip(seq_lens, query_lens):
        ctx_len = s_len - q_len

        q_c = torch.rand(
            q_len,
            num_heads,
            qk_nope_head_dim + qk_rope_head_dim,
            dtype=dtype,
            device=device,
        )
        kv_c_full = torch.rand(s_len, kv_lora_rank, dtype=dtype, device=device)
        k_pe_full = torch.rand(s_len, 1, qk_rope_head_dim, dtype=dtype, device=device)

        if force_future_dominance:
            # Scale the last block token's latent KV so its key/value dominate the
            # softmax for any query attending to it. 4x in the latent dot makes its
            # pre-softmax score exceed the others by a wide margin, so non-causal
            # queries (which include it) diverge sharply from causal ones (which,
            # for all but the last query, exclude it). Applied before quantization
            # so cache and reference stay consistent.
            kv_c_full[s_len - 1] = kv_c_full[s_len - 1] * 4.0 + 2.0

        if use_fp8_ds_mla_quantization:
            is_sm100 = torch.cuda.get_device_capability()[0] >= 10
            kv_c_full, k_pe_squeezed = _quantize_dequantize_fp8_ds_mla(
                kv_c_full,
                k_pe_full.squeeze(1),
                block_size=block_size,
                scale=kv_cache_scale,
                simulate_sm100_e8m0_scales=is_sm100,
            )
            k_pe_full = k_pe_squeezed.unsqueeze(1)

        q_nope, q_pe = q_c.split([qk_nope_head_dim, qk_rope_head_dim], dim=-1)
        ql_nope = torch.einsum("qnh,lnh->qnl", q_nope, W_UK)
        q_mqa = torch.cat([ql_nope, q_pe], dim=-1)

        k_mqa = torch.cat([kv_c_full, k_pe_full.squeeze(1)], dim=-1)
        v_mqa = kv_c_full

        # Per-token sparse SDPA reference over the supplied (non-causal) indices.
        def _sparse_sdpa(idx_tensor, q_tok, k_mqa=k_mqa, v_mqa=v_mqa):
            k_sparse = k_mqa[idx_tensor].unsqueeze(1).expand(-1, num_heads, -1)
            v_sparse = v_mqa[idx_tensor].unsqueeze(1).expand(-1, num_heads, -1)
            out = torch.nn.functional.scaled_dot_product_attention(
                q_tok.unsqueeze(0).transpose(1, 2),
                k_sparse.unsqueeze(0).transpose(1, 2),
                v_sparse.unsqueeze(0).transpose(1, 2),
                scale=scale,
            )
            out = out.transpose(1, 2).squeeze(0)
            out = torch.einsum("qnl,lnv->qnv", out, W_UV)
            return out.flatten(start_dim=-2)

        for q_idx in range(q_len):
            tok_sparse_idx = sparse_indices[global_token_idx]
            valid_indices = tok_sparse_idx[tok_sparse_idx >= 0].long()

            q_tok = q_mqa[q_idx : q_idx + 1]
            reference_outputs.append(_sparse_sdpa(valid_indices, q_tok))

            # Causal: drop indices pointing past this query's own position.
            abs_pos = ctx_len + q_idx
            causal_indices = valid_indices[valid_indices <= abs_pos]
            causal_reference_outputs.append(_sparse_sdpa(causal_indices, q_tok))
            global_token_idx += 1

        all_q_vllm.append(q_c)
        all_kv_c_vllm.append(kv_c_full[ctx_len:])
        all_k_pe_vllm.append(k_pe_full[ctx_len:])
        kv_c_contexts.append(kv_c_full[: ctx_len + 1])
        k_pe_contexts.append(k_pe_full[: ctx_len + 1])

    query_vllm = torch.cat(all_q_vllm, dim=0)
    kv_c_vllm = torch.cat(all_kv_c_vllm, dim=0)
    k_pe_vllm = torch.cat(all_k_pe_vllm, dim=0)
    sdpa_reference = torch.cat(reference_outputs, dim=0)
    causal_reference = torch.cat(causal_reference_outputs, dim=0)

    vllm_config.cache_config.cache_dtype = kv_cache_dtype
    vllm_config.model_config.hf_text_config.index_topk = topk_tokens

    common_attn_metadata = create_common_attn_metadata(
        batch_spec, block_size, device, arange_block_indices=True
    )
    if stale_cpu_query_lens is not None:
        # Adaptive verification updates only device boundaries; the stale CPU
        # copy proves token_to_req_indices consumes the device layout.
        assert len(stale_cpu_query_lens) == len(query_lens)
        cpu_query_start_loc = [0]
        for query_len in stale_cpu_query_lens:
            cpu_query_start_loc.append(cpu_query_start_loc[-1] + query_len)
        common_attn_metadata.query_start_loc_cpu = torch.tensor(
            cpu_query_start_loc, dtype=torch.int32
        )
    kv_cache = create_and_prepopulate_kv_cache(
        kv_c_contexts=kv_c_contexts,
        k_pe_contexts=k_pe_contexts,
        block_size=block_size,
        head_size=head_size,
        dtype=dtype,
        device=device,
        num_blocks=vllm_config.cache_config.num_gpu_blocks,
        common_attn_metadata=common_attn_metadata,
        randomize_blocks=False,
        kv_cache_dtype=kv_cache_dtype,
        scale=kv_cache_scale,
    )

    # The sparse builder clones the layer's dense-MHA prefill backend from
    # static_forward_context; register a mock layer carrying one.
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend

    prefill_backend = get_mla_prefill_backend(vllm_config)(
        num_heads=num_heads,
        scale=scale,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=v_head_dim,
        vllm_config=vllm_config,
    )
    vllm_config.compilation_config.static_forward_context["placeholder"] = (
        SimpleNamespace(prefill_backend=prefill_backend)
    )

    builder = backend_cls.get_builder_cls()(
        kv_cache_spec, ["placeholder"], vllm_config, device
    )
    metadata = builder.build(
        common_prefix_len=0, common_attn_metadata=common_attn_metadata
    )

    mock_indexer = SimpleNamespace(topk_indices_buffer=sparse_indices)

    kv_b_proj_weight = torch.cat([W_UK, W_UV], dim=-1).view(
        kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim)
    )
    mock_kv_b_proj = ColumnParallelLinear(
        input_size=kv_lora_rank,
        output_size=num_heads * (qk_nope_head_dim + v_head_dim),
        bias=False,
    ).to(device=device, dtype=dtype)
    mock_kv_b_proj.weight = torch.nn.Parameter(kv_b_proj_weight.T.contiguous())

    with set_current_vllm_config(vllm_config):
        impl = backend_cls.get_impl_cls()(
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            qk_head_dim=qk_nope_head_dim + qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_b_proj=mock_kv_b_proj,
            indexer=mock_indexer,
        )
        impl.process_weights_after_loading(dtype)
        mock_layer = MockSparseMLAAttentionLayer(
            impl=impl,
            num_heads=num_heads,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_lora_rank=kv_lora_rank,
            device=device,
            W_UK=W_UK,
            W_UV=W_UV,
            q_scale=1.0,
            k_scale=1.0,
        )

    out_buffer = torch.empty(
        metadata.num_actual_tokens, num_heads * v_head_dim, dtype=dtype, device=device
    )
    with torch.inference_mode():
        impl.record_logical_topk_ready()
        backend_output = mock_layer.forward_impl(
            query_vllm, kv_c_vllm, k_pe_vllm, kv_cache, metadata, out_buffer
        )
        if capture_graph:
            device_boundaries = common_attn_metadata.query_start_loc.clone()
            common_attn_metadata.query_start_loc.copy_(
                common_attn_metadata.query_start_loc_cpu
            )
            metadata = builder.build(0, common_attn_metadata)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                impl.record_logical_topk_ready()
                backend_output = mock_layer.forward_impl(
                    query_vllm, kv_c_vllm, k_pe_vllm, kv_cache, metadata, out_buffer
                )
            common_attn_metadata.query_start_loc.copy_(device_boundaries)
            builder.build(0, common_attn_metadata)
            graph.replay()
    return backend_output, sdpa_reference, causal_reference


def _skip_if_backend_unavailable(backend_cls, kv_cache_dtype: str, block_size: int):
    if kv_cache_dtype not in backend_cls.supported_kv_cache_dtypes:
        pytest.skip(f"{backend_cls.get_name()} does not support {kv_cache_dtype}")
    if (
        backend_cls is FlashMLASparseBackend
        and kv_cache_dtype.startswith("fp8")
        and kv_cache_dtype != "fp8_ds_mla"
    ):
        pytest.skip("FlashMLA Sparse fp8 only supports fp8_ds_mla kv-cache dtype")
    if not backend_cls.supports_block_size(block_size):
        pytest.skip(
            f"{backend_cls.get_name()} does not support block_size={block_size}"
        )
    if backend_cls is FlashMLASparseBackend:
        ok, reason = flashmla.is_flashmla_sparse_supported()
        if not ok:
            pytest.skip(reason)
    elif backend_cls is FlashInferMLASparseTRTLLMBackend:
        cap = current_platform.get_device_capability()
        if cap is None or not backend_cls.supports_compute_capability(cap):
            pytest.skip("FlashInferMLASparseTRTLLMBackend requires SM 10.x capability")


@pytest.mark.parametrize("query_lens", [[1, 7, 3, 5], [1, 7, 8, 0]])
def test_flashinfer_sparse_mla_adaptive_varlen_graph_matches_sdpa(
    default_vllm_config,
    dist_init,
    workspace_init,
    query_lens,
    monkeypatch,
):
    """Replay uses device boundaries, including empty padding, despite stale CPU."""
    backend_cls = FlashInferMLASparseTRTLLMBackend
    _skip_if_backend_unavailable(backend_cls, "fp8", 64)

    device = torch.device(DEVICE_TYPE)
    seq_lens = [257, 270, 265, 276]
    sparse_indices = _build_dspark_noncausal_indices(
        seq_lens,
        query_lens,
        window=128,
        topk_width=256,
        device=device,
    )

    backend_output, sdpa_reference, _ = _run_sparse_backend_vs_sdpa(
        backend_cls,
        seq_lens,
        query_lens,
        sparse_indices,
        "fp8",
        64,
        16,
        device,
        monkeypatch=monkeypatch,
        qk_nope_head_dim=192,
        v_head_dim=256,
        stale_cpu_query_lens=[4, 4, 4, 4],
        capture_graph=True,
    )

    torch.testing.assert_close(
        backend_output,
        sdpa_reference,
        rtol=0.065,
        atol=0.05,
    )


@pytest.mark.parametrize(
    "backend_cls",
    [FlashMLASparseBackend, FlashInferMLASparseTRTLLMBackend],
    ids=["FlashMLA", "FlashInferTRTLLM"],
)
@pytest.mark.parametrize("config_name", list(_DSPARK_CONFIGS.keys()))
# Per backend, the skip logic routes fp8 to the supported flavor: FlashMLA tests
# auto + fp8_ds_mla (and skips per-tensor "fp8", which it aliases to ds_mla);
# FlashInfer TRTLLM tests auto + per-tensor "fp8" (and skips fp8_ds_mla, which it
# does not implement). So both backends get a bf16 case and an fp8 case.
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla", "fp8"])
@pytest.mark.parametrize("block_size", [64])
# h_q=128 -> B_TOPK=128; h_q=64 -> B_TOPK=64 (covers the head64 decode path the
# SM100 alignment assert specifically guards). Aligned widths (128/256) satisfy both.
@pytest.mark.parametrize("num_heads", [128, 64], ids=["h128", "h64"])
def test_dspark_noncausal_sparse_mla_matches_sdpa(
    default_vllm_config,
    dist_init,
    workspace_init,
    backend_cls,
    config_name,
    kv_cache_dtype,
    block_size,
    num_heads,
    monkeypatch,
):
    """Non-causal (window ∪ block, future-pointing) per-token indices must match
    a dense SDPA reference over the same indices, for both sparse-MLA backends."""
    _skip_if_backend_unavailable(backend_cls, kv_cache_dtype, block_size)

    window, block, topk_width = _DSPARK_CONFIGS[config_name]
    device = torch.device(DEVICE_TYPE)

    # Decode-style batch: each request has `block` query tokens and enough
    # context for a full sliding window.
    seq_lens = [window + block + 123, window + block + 50]
    query_lens = [block, block]

    sparse_indices = _build_dspark_noncausal_indices(
        seq_lens, query_lens, window, topk_width, device
    )

    # Sanity: the construction must actually be non-causal (an early block query
    # must reference a later block position than itself).
    ctx0 = seq_lens[0] - query_lens[0]
    first_query_valid = sparse_indices[0][sparse_indices[0] >= 0]
    assert int(first_query_valid.max()) >= ctx0 + query_lens[0] - 1, (
        "expected the first block query to attend to a future block token"
    )

    backend_output, sdpa_reference, _ = _run_sparse_backend_vs_sdpa(
        backend_cls,
        seq_lens,
        query_lens,
        sparse_indices,
        kv_cache_dtype,
        block_size,
        num_heads,
        device,
        monkeypatch=monkeypatch,
    )

    assert backend_output.shape == sdpa_reference.shape
    assert backend_output.dtype == sdpa_reference.dtype
    assert torch.isfinite(backend_output).all()
    if kv_cache_dtype.startswith("fp8"):
        rtol, atol = 0.065, 0.05
    else:
        rtol, atol = 0.01, 0.01
    torch.testing.assert_close(backend_output, sdpa_reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "backend_cls",
    [FlashMLASparseBackend, FlashInferMLASparseTRTLLMBackend],
    ids=["FlashMLA", "FlashInferTRTLLM"],
)
@pytest.mark.parametrize("config_name", list(_DSPARK_CONFIGS.keys()))
@pytest.mark.parametrize("block_size", [64])
def test_dspark_noncausal_differs_from_causal(
    default_vllm_config,
    dist_init,
    workspace_init,
    backend_cls,
    config_name,
    block_size,
    monkeypatch,
):
    """Differentiation guard: prove the backend genuinely attends to the
    future-pointing indices (not silently applying a causal mask, and not merely
    coinciding with a causal result because future tokens carry little weight).

    With random data the few future block tokens are a negligible fraction of the
    attended set (especially with a wide window), so causal and non-causal outputs
    are numerically indistinguishable -- that is correct physics, not a backend
    bug. To make the check meaningful we use ``force_future_dominance`` so the last
    block token dominates the softmax: the backend must then match the non-causal
    reference and diverge sharply from the causal one. bf16 (``auto``) suffices;
    the property is dtype-independent and fp8 correctness is covered above.
    """
    _skip_if_backend_unavailable(backend_cls, "auto", block_size)

    window, block, topk_width = _DSPARK_CONFIGS[config_name]
    device = torch.device(DEVICE_TYPE)
    seq_lens = [window + block + 123, window + block + 50]
    query_lens = [block, block]

    sparse_indices = _build_dspark_noncausal_indices(
        seq_lens, query_lens, window, topk_width, device
    )

    backend_output, sdpa_reference, causal_reference = _run_sparse_backend_vs_sdpa(
        backend_cls,
        seq_lens,
        query_lens,
        sparse_indices,
        "auto",
        block_size,
        128,
        device,
        monkeypatch=monkeypatch,
        force_future_dominance=True,
    )

    # The two references must be clearly distinguishable for the check to mean
    # anything (dominance guarantees this).
    ref_gap = (sdpa_reference - causal_reference).abs().max().item()
    assert ref_gap > 0.1, (
        f"non-causal and causal references are too close (gap={ref_gap}); "
        "force_future_dominance did not create a separable scenario"
    )

    # Backend must track the NON-causal reference, not the causal one.
    torch.testing.assert_close(backend_output, sdpa_reference, rtol=0.01, atol=0.01)
    causal_err = (backend_output - causal_reference).abs().max().item()
    assert causal_err > 0.1, (
        f"non-causal backend output matches the causal reference "
        f"(max abs diff={causal_err}); future-pointing indices are not attended to"
    )


@pytest.mark.parametrize("context_len", [20, 128, 900])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_heads", [16, 64])
def test_dsv41_flashinfer_dspark_window_matches_reference(
    context_len, dtype, num_heads, monkeypatch
):
    """Draft queries see the full block without treating padded slots as keys."""
    if not current_platform.is_device_capability_family(100):
        pytest.skip("DSV4 TRTLLM sparse attention requires SM100")
    from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import (
        DeepseekSparseSWAFlashInferMetadataBuilder,
        DeepseekV4FlashInferMLAAttention,
    )
    from vllm.models.deepseek_v41.sparse_mla import (
        DeepseekV41SparseSWAMetadataBuilder,
    )

    torch.manual_seed(123)
    device = "cuda"
    query_lens = [5, 3]
    context_lens = [context_len, context_len + 137]
    num_real_tokens, num_tokens, head_dim = 8, 9, 512
    cache = torch.randn(32, 128, head_dim, device=device, dtype=torch.bfloat16).to(
        dtype
    )
    query = torch.randn(
        num_tokens, num_heads, head_dim, device=device, dtype=torch.bfloat16
    ).to(dtype)
    indices = torch.full((num_tokens, 256), -1, device=device, dtype=torch.int32)
    visible_indices = []
    visible_lens = []
    for req, (context, query_len) in enumerate(zip(context_lens, query_lens)):
        visible = (
            torch.arange(max(context - 128, 0), context + query_len, device=device)
            + req * 16 * 128
        )
        visible_indices.extend([visible] * query_len)
        visible_lens.extend([visible.numel()] * query_len)
    for token, visible in enumerate(visible_indices):
        indices[token, : visible.numel()] = visible.to(torch.int32)
    query_start_loc = torch.tensor([0, 5, 8, 9], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_decodes=3,
        num_prefills=0,
        num_decode_tokens=num_tokens,
        num_prefill_tokens=0,
        seq_lens=torch.tensor(
            [context_lens[0] + 5, context_lens[1] + 3, 1],
            device=device,
            dtype=torch.int32,
        ),
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        token_to_req_indices=torch.tensor(
            [0] * 5 + [1] * 3 + [2], device=device, dtype=torch.int32
        ),
        decode_swa_indices=indices,
        decode_swa_width=256,
        decode_swa_lens=torch.tensor(
            visible_lens + [0], device=device, dtype=torch.int32
        ),
        block_table=torch.arange(48, device=device, dtype=torch.int32).view(3, -1),
        block_size=128,
        replay_start=torch.zeros(3, device=device, dtype=torch.int32),
        flashinfer_sparse_index_cache={},
        max_decode_query_len=5,
    )

    # Exercise FlashInfer preparation without constructing a model/config.
    def init_parent(builder):
        builder._max_tokens = num_tokens
        builder.device = device
        builder.window_size = 128

    monkeypatch.setattr(DeepseekV41SparseSWAMetadataBuilder, "__init__", init_parent)
    monkeypatch.setattr(
        DeepseekV41SparseSWAMetadataBuilder,
        "build",
        lambda *args: metadata,
    )
    builder = DeepseekSparseSWAFlashInferMetadataBuilder()
    common_metadata = SimpleNamespace(causal=False)
    builder.build(0, common_metadata)
    prepared = (
        metadata.flashinfer_decode_topk_lens,
        metadata.flashinfer_decode_seq_lens,
    )
    attention = SimpleNamespace(
        kv_cache_torch_dtype=dtype,
        window_size=128,
        compress_ratio=0,
        topk_indices_buffer=torch.empty(
            num_tokens, 0, device=device, dtype=torch.int32
        ),
        scale=1 / math.sqrt(head_dim),
        _flashinfer_fp8_bmm1_scale=1 / math.sqrt(head_dim),
        _flashinfer_fp8_bmm2_scale=1.0,
        attn_sink=None,
    )
    attention._build_sparse_index_metadata = MethodType(
        DeepseekV4FlashInferMLAAttention._build_sparse_index_metadata, attention
    )
    output = torch.empty_like(query, dtype=torch.bfloat16)

    def forward():
        metadata.flashinfer_sparse_index_cache.clear()
        DeepseekV4FlashInferMLAAttention._forward(
            attention, query, None, cache, metadata, None, True, output
        )

    def check_output():
        references = []
        for token, visible in enumerate(visible_indices):
            keys = cache.flatten(0, 1)[visible].float()
            weights = torch.softmax(
                query[token].float() @ keys.T / math.sqrt(head_dim), -1
            )
            references.append(weights @ keys)
        atol = 0.01 if dtype == torch.bfloat16 else 0.05
        torch.testing.assert_close(
            output[:num_real_tokens].float(),
            torch.stack(references),
            atol=atol,
            rtol=0.05,
        )

    forward()
    check_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    # Replay must consume the current inputs, including KV written since capture.
    query.copy_(torch.randn_like(query, dtype=torch.bfloat16).to(dtype))
    cache.copy_(torch.randn_like(cache, dtype=torch.bfloat16).to(dtype))
    # A new step changes visibility as well as Q/KV, without recapturing.
    metadata.seq_lens.sub_(1)
    metadata.decode_swa_lens[:num_real_tokens].sub_(1)
    for token, visible in enumerate(visible_indices):
        indices[token, visible.numel() - 1] = -1
        visible_indices[token] = visible[:-1]
    builder.build(0, common_metadata)
    assert metadata.flashinfer_decode_topk_lens.data_ptr() == prepared[0].data_ptr()
    assert metadata.flashinfer_decode_seq_lens.data_ptr() == prepared[1].data_ptr()
    torch.testing.assert_close(prepared[0], metadata.decode_swa_lens.clamp_min(128))
    torch.testing.assert_close(
        prepared[1], metadata.seq_lens[metadata.token_to_req_indices.long()]
    )
    graph.replay()
    check_output()
