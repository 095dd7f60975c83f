# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests for running the generation lm_head in fp32 via ``head_dtype``.

An fp32 head lets rollout logits match a trainer that computes the lm_head in
fp32, which is required for RL training-inference consistency.
"""

import math

import pytest
import torch

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)


class _FakeLmHead:
    def __init__(
        self,
        weight: torch.Tensor,
        quantized: bool = False,
        shard_indices: object | None = None,
    ):
        self.weight = weight
        self.quant_method = object() if quantized else UnquantizedEmbeddingMethod()
        self.shard_indices = shard_indices
        self.tp_size = 1


def _fake_lm_head(
    weight: torch.Tensor, quantized: bool = False, shard_indices: object | None = None
) -> VocabParallelEmbedding:
    # The dtype tests only need the projection fields, not distributed setup.
    return _FakeLmHead(weight, quantized, shard_indices)  # type: ignore[return-value]


def _build_processor(vocab_size: int) -> LogitsProcessor:
    lp = LogitsProcessor(vocab_size)
    # The TP gather is orthogonal to the dtype behavior under test.
    lp._gather_logits = lambda logits: logits  # type: ignore[method-assign]
    return lp


def test_fp32_head_runs_projection_in_fp32(default_vllm_config):
    vocab_size, hidden_size, num_tokens = 64, 16, 4
    lp = _build_processor(vocab_size)
    lp.head_dtype = torch.float32

    hidden_states = torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16)

    logits = lp._get_logits(hidden_states, _fake_lm_head(weight), None)

    assert logits is not None
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    expected = torch.nn.functional.linear(hidden_states.float(), weight.float())
    torch.testing.assert_close(logits, expected)


def test_non_fp32_head_dtype_uses_cast_path(default_vllm_config):
    # head_dtype != fp32 must not hit the CUDA out_dtype-mm fast path
    # (torch.mm only supports fp32 out for fp16/bf16 inputs); the cast path
    # handles any dtype.
    vocab_size, hidden_size = 64, 16
    lp = _build_processor(vocab_size)
    lp.head_dtype = torch.float16

    hidden_states = torch.randn(4, hidden_size, dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16)

    logits = lp._get_logits(hidden_states, _fake_lm_head(weight), None)

    assert logits is not None
    assert logits.dtype == torch.float16
    expected = torch.nn.functional.linear(hidden_states.half(), weight.half())
    torch.testing.assert_close(logits, expected)


def test_head_dtype_equal_to_model_dtype_uses_quant_method(default_vllm_config):
    from unittest import mock

    vocab_size, hidden_size = 64, 16
    lp = _build_processor(vocab_size)
    lp.head_dtype = torch.bfloat16

    hidden_states = torch.randn(4, hidden_size, dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16)
    lm_head = _fake_lm_head(weight)

    with mock.patch.object(
        lm_head.quant_method,
        "apply",
        side_effect=lambda layer, x, bias=None: torch.nn.functional.linear(
            x, layer.weight, bias
        ),
    ) as apply_mock:
        logits = lp._get_logits(hidden_states, lm_head, None)

    apply_mock.assert_called_once()
    assert logits is not None
    assert logits.dtype == torch.bfloat16


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="Exercises the torch.mm(out_dtype=...) device fast path, "
    "available on CUDA and ROCm.",
)
def test_fp32_head_uses_mm_fast_path_on_device(default_vllm_config):
    # On ROCm, current_platform.is_cuda() is False, so this previously fell
    # through to the cast path (F.linear) instead of torch.mm(out_dtype=...),
    # even though ROCm supports the out_dtype mm via its non-Lt GEMM path.
    from unittest import mock

    vocab_size, hidden_size, num_tokens = 64, 16, 4
    lp = _build_processor(vocab_size)
    lp.head_dtype = torch.float32

    hidden_states = torch.randn(
        num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda"
    )
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16, device="cuda")

    with mock.patch(
        "vllm.model_executor.layers.logits_processor.F.linear"
    ) as linear_mock:
        logits = lp._get_logits(hidden_states, _fake_lm_head(weight), None)

    linear_mock.assert_not_called()
    assert logits is not None
    assert logits.dtype == torch.float32
    expected = torch.nn.functional.linear(hidden_states.float(), weight.float())
    torch.testing.assert_close(logits, expected)


def test_fp32_head_rejects_quantized_lm_head(default_vllm_config):
    lp = _build_processor(64)
    lp.head_dtype = torch.float32
    lm_head = _fake_lm_head(torch.randn(64, 16, dtype=torch.bfloat16), quantized=True)

    with pytest.raises(ValueError, match="unquantized"):
        lp._get_logits(torch.randn(4, 16, dtype=torch.bfloat16), lm_head, None)


def test_replicated_lm_head_skips_tp_communication_and_preserves_processing(
    default_vllm_config,
):
    from unittest import mock

    vocab_size, hidden_size = 12, 8
    soft_cap, scale = 2.0, 0.5
    lp = LogitsProcessor(
        vocab_size,
        soft_cap=soft_cap,
        scale=scale,
    )
    lp.head_dtype = torch.float32

    hidden_states = torch.randn(4, hidden_size, dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16)
    world_size_getter = (
        "vllm.model_executor.layers.vocab_parallel_embedding."
        "get_tensor_model_parallel_world_size"
    )
    with mock.patch(world_size_getter, return_value=2):
        lm_head = ParallelLMHead(
            vocab_size,
            hidden_size,
            params_dtype=torch.bfloat16,
            disable_tp=True,
        )
    lm_head.weight_loader(lm_head.weight, weight)
    assert lm_head.tp_size == 1

    with mock.patch.object(lp, "_gather_logits") as gather_mock:
        logits = lp(lm_head, hidden_states)

    gather_mock.assert_not_called()

    expected = torch.nn.functional.linear(hidden_states.float(), weight.float())
    expected = torch.tanh(expected / soft_cap) * soft_cap * scale
    torch.testing.assert_close(logits, expected)

    all_gather_path = (
        "vllm.model_executor.layers.logits_processor.tensor_model_parallel_all_gather"
    )
    with mock.patch(all_gather_path) as all_gather:
        top = lp.get_top_tokens(lm_head, hidden_states)

    all_gather.assert_not_called()
    assert torch.equal(top, expected.argmax(dim=-1))


def test_get_top_tokens_honors_head_dtype(default_vllm_config):
    # The spec-decode local-argmax path (get_top_tokens) must run the lm_head
    # in head_dtype too, not just _get_logits.
    import types

    vocab_size, hidden_size = 64, 16
    lp = _build_processor(vocab_size)
    lp.head_dtype = torch.float32

    hidden_states = torch.randn(4, hidden_size, dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16)
    lm_head = _fake_lm_head(
        weight,
        shard_indices=types.SimpleNamespace(
            num_org_vocab_padding=0, org_vocab_start_index=0
        ),
    )

    top = lp.get_top_tokens(lm_head, hidden_states, None)
    expected = torch.nn.functional.linear(hidden_states.float(), weight.float()).argmax(
        dim=-1
    )
    assert torch.equal(top, expected)


@pytest.mark.core_model
def test_fp32_head_e2e_no_nan():
    """An fp32 head produces finite logprobs end-to-end.

    Runs on the default (v2) model runner and exercises the
    processed_logprobs path, which forces the native sampler and is where a
    non-contiguous fp32 logits row previously produced NaN.
    """
    llm = LLM(
        model="facebook/opt-125m",
        hf_overrides={"head_dtype": "float32"},
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        gpu_memory_utilization=0.5,
        max_model_len=256,
    )
    sampling_params = SamplingParams(
        temperature=1.0, top_p=0.95, top_k=50, max_tokens=32, logprobs=5, seed=0
    )
    outputs = llm.generate(
        ["The capital of France is", "Once upon a time,"], sampling_params
    )

    for output in outputs:
        for completion in output.outputs:
            assert completion.logprobs is not None
            for token_id, position in zip(completion.token_ids, completion.logprobs):
                assert position is not None
                # The sampled token survived filtering, so its logprob is finite.
                assert math.isfinite(position[token_id].logprob)
                # No returned logprob is NaN.
                assert not any(math.isnan(lp.logprob) for lp in position.values())
