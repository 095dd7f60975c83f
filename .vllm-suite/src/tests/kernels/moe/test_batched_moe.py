# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from dataclasses import dataclass

import pytest
import torch

from tests.kernels.moe.utils import (
    batched_moe,
    make_dummy_moe_config,
    make_quantized_test_activations,
    make_test_weights,
    naive_batched_moe,
)
from tests.kernels.quant_utils import native_batched_masked_quant_matmul
from tests.kernels.utils import torch_experts
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import fused_topk
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import (
    BatchedTritonExperts,
    invoke_moe_batched_triton_kernel,
)
from vllm.platforms import current_platform
from vllm.triton_utils import tl
from vllm.utils.torch_utils import set_random_seed

DEVICE = current_platform.device_type

pytestmark = pytest.mark.skipif(
    not (current_platform.is_cuda_alike() or current_platform.is_xpu()),
    reason="Triton MoE kernels require CUDA/ROCm/XPU.",
)

MNK_FACTORS = [
    (1, 128, 128),
    (1, 512, 512),
    (1, 1024, 2048),
    (32, 128, 128),
    (32, 512, 512),
    (32, 1024, 2048),
    (45, 128, 2048),
    (45, 1024, 128),
    (64, 512, 512),
    (64, 1024, 2048),
    (222, 128, 2048),
    (222, 1024, 2048),
]
NUM_EXPERTS = [8, 64]
TOP_KS = [1, 2, 6]

DTYPES = [torch.bfloat16]

if not current_platform.is_fp8_fnuz():
    DTYPES.append(torch.float8_e4m3fn)

vllm_config = VllmConfig()


@dataclass
class BatchedMMConfig:
    in_dtype: torch.dtype
    quant_dtype: torch.dtype | None
    out_dtype: torch.dtype
    num_experts: int
    max_tokens_per_expert: int
    K: int
    N: int


@dataclass
class BatchedMMTensors:
    A: torch.Tensor  # [E, max_tokens, K]
    B: torch.Tensor  # [E, K, N] - column major
    C: torch.Tensor  # [E, max_tokens, N]
    num_expert_tokens: torch.Tensor  # [E]

    @staticmethod
    def make_tensors(config: BatchedMMConfig):
        A = (
            torch.randn(
                (config.num_experts, config.max_tokens_per_expert, config.K),
                device=DEVICE,
                dtype=config.in_dtype,
            )
            / 10
        )
        B = torch.randn(
            (config.num_experts, config.N, config.K),
            device=DEVICE,
            dtype=config.in_dtype,
        )
        C = torch.zeros(
            (config.num_experts, config.max_tokens_per_expert, config.N),
            device=DEVICE,
            dtype=config.out_dtype,
        )

        num_expert_tokens = torch.randint(
            low=0,
            high=config.max_tokens_per_expert,
            size=(config.num_experts,),
            device=DEVICE,
            dtype=torch.int32,
        )

        return BatchedMMTensors(A, B, C, num_expert_tokens)


@pytest.mark.parametrize("num_experts", [8, 32])
@pytest.mark.parametrize("max_tokens_per_expert", [32, 224, 512])
@pytest.mark.parametrize("K", [128, 1024])
@pytest.mark.parametrize("N", [128, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", [None, [128, 128]])
@pytest.mark.parametrize("per_act_token_quant", [False, True])
# Tuned configs can pick a BLOCK_SIZE_K wider than the quantization block.
@pytest.mark.parametrize("fp8_block_k", [32, 256])
def test_batched_mm(
    num_experts: int,
    max_tokens_per_expert: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    block_shape: list[int] | None,
    per_act_token_quant: bool,
    fp8_block_k: int,
):
    """Note: float8_e4m3fn is not supported on CUDA architecture < 89,
    and those tests will be skipped on unsupported hardware."""
    set_random_seed(7)

    use_fp8_w8a8 = dtype == torch.float8_e4m3fn

    if (
        dtype == torch.float8_e4m3fn
        and current_platform.is_cuda_alike()
        and not current_platform.has_device_capability(89)
    ):
        pytest.skip(
            "Triton limitation: fp8e4nv data type is not supported on CUDA arch < 89"
        )

    if (per_act_token_quant or block_shape is not None) and not use_fp8_w8a8:
        pytest.skip("Don't test blocking for non-quantized types.")

    if per_act_token_quant and block_shape is not None:
        pytest.skip("Skip illegal quantization test.")

    if fp8_block_k != 32 and not use_fp8_w8a8:
        pytest.skip("BLOCK_SIZE_K is only varied for fp8.")

    if dtype.itemsize == 1:
        act_dtype = torch.bfloat16
        quant_dtype = dtype
    else:
        act_dtype = dtype
        quant_dtype = None

    num_expert_tokens = torch.randint(
        low=0,
        high=max_tokens_per_expert,
        size=(num_experts,),
        device=DEVICE,
        dtype=torch.int32,
    )

    A, A_q, A_scale = make_quantized_test_activations(
        num_experts,
        max_tokens_per_expert,
        K,
        in_dtype=act_dtype,
        quant_dtype=quant_dtype,
        block_shape=block_shape,
        per_act_token_quant=per_act_token_quant,
    )

    (B, B_q, B_scale, _), _ = make_test_weights(
        num_experts,
        N // 2,
        K,
        in_dtype=act_dtype,
        quant_dtype=quant_dtype,
        block_shape=block_shape,
        per_out_ch_quant=per_act_token_quant,
    )

    out_shape = (num_experts, max_tokens_per_expert, N)
    test_output = torch.zeros(out_shape, dtype=act_dtype, device=DEVICE)
    ref_output = torch.zeros(out_shape, dtype=act_dtype, device=DEVICE)
    q_ref_output = torch.zeros(out_shape, dtype=act_dtype, device=DEVICE)

    compute_tl_dtype = {
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float32: tl.float32,
    }[test_output.dtype]

    assert A_q.dtype == B_q.dtype

    invoke_moe_batched_triton_kernel(
        A_q,
        B_q,
        test_output,
        num_expert_tokens,
        compute_tl_dtype,
        # Quantization data
        A_scale,
        B_scale,
        None,
        # Quantization schemes
        use_fp8_w8a8,
        False,
        False,
        config={
            "BLOCK_SIZE_M": 16,
            "BLOCK_SIZE_N": 16,
            "BLOCK_SIZE_K": 16 if dtype.itemsize > 1 else fp8_block_k,
        },
        per_act_token_quant=per_act_token_quant,
        block_shape=block_shape,
    )

    ref_output = native_batched_masked_quant_matmul(
        A,
        B,
        ref_output,
        num_expert_tokens,
    )

    q_ref_output = native_batched_masked_quant_matmul(
        A_q,
        B_q,
        q_ref_output,
        num_expert_tokens,
        A_scale,
        B_scale,
        block_shape,
        per_act_token_quant,
    )

    rtol, atol = {
        torch.float16: (6e-2, 6e-2),
        torch.bfloat16: (6e-2, 6e-2),
        torch.float32: (1e-2, 1e-2),
    }[test_output.dtype]

    torch.testing.assert_close(ref_output, q_ref_output, atol=atol, rtol=rtol)
    torch.testing.assert_close(test_output, q_ref_output, atol=atol, rtol=rtol)


@pytest.mark.parametrize("scale_shape", ["[E]", "[E,1,1]"])
def test_batched_mm_per_tensor_weight_per_token_act(scale_shape: str):
    """Per-tensor weight scales must broadcast along N when activations are
    quantized per token, instead of indexing into other experts' scales."""
    if torch.float8_e4m3fn not in DTYPES or (
        current_platform.is_cuda_alike()
        and not current_platform.has_device_capability(89)
    ):
        pytest.skip("float8_e4m3fn is not supported on this device")
    set_random_seed(7)

    E, M, K, N = 8, 64, 256, 256
    num_expert_tokens = torch.randint(
        1, M + 1, size=(E,), device=DEVICE, dtype=torch.int32
    )
    _, A_q, A_scale = make_quantized_test_activations(
        E,
        M,
        K,
        in_dtype=torch.bfloat16,
        quant_dtype=torch.float8_e4m3fn,
        per_act_token_quant=True,
    )
    (_, B_q, B_scale, _), _ = make_test_weights(
        E, N // 2, K, in_dtype=torch.bfloat16, quant_dtype=torch.float8_e4m3fn
    )
    assert B_scale is not None and B_scale.numel() == E
    B_scale = B_scale.view(-1) if scale_shape == "[E]" else B_scale.view(-1, 1, 1)

    test_output = torch.zeros((E, M, N), dtype=torch.bfloat16, device=DEVICE)
    invoke_moe_batched_triton_kernel(
        A_q,
        B_q,
        test_output,
        num_expert_tokens,
        tl.bfloat16,
        A_scale,
        B_scale,
        None,
        True,
        False,
        False,
        config={"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 32},
        per_act_token_quant=True,
    )

    ref_output = native_batched_masked_quant_matmul(
        A_q,
        B_q,
        torch.zeros_like(test_output),
        num_expert_tokens,
        A_scale,
        B_scale.view(-1, 1, 1),
        None,
        True,
    )
    torch.testing.assert_close(test_output, ref_output, atol=6e-2, rtol=6e-2)


@pytest.mark.parametrize(("m", "n", "k"), MNK_FACTORS)
@pytest.mark.parametrize("e", NUM_EXPERTS)
@pytest.mark.parametrize("topk", TOP_KS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_act_token_quant", [False, True])
@pytest.mark.parametrize("block_shape", [None, [128, 128]])
@pytest.mark.parametrize("input_scales", [False])
def test_fused_moe_batched_experts(
    m: int,
    n: int,
    k: int,
    e: int,
    topk: int,
    dtype: torch.dtype,
    per_act_token_quant: bool,
    block_shape: list[int] | None,
    input_scales: bool,
    workspace_init,
):
    """Note: float8_e4m3fn is not supported on CUDA architecture < 89,
    and those tests will be skipped on unsupported hardware."""
    set_random_seed(7)

    use_fp8_w8a8 = dtype == torch.float8_e4m3fn

    if (
        dtype == torch.float8_e4m3fn
        and current_platform.is_cuda_alike()
        and not current_platform.has_device_capability(89)
    ):
        pytest.skip(
            "Triton limitation: fp8e4nv data type is not supported on CUDA arch < 89"
        )

    if topk > e:
        pytest.skip("topk > e")

    if not use_fp8_w8a8 and (per_act_token_quant or block_shape is not None):
        pytest.skip("Skip quantization test for non-quantized type")

    if per_act_token_quant and block_shape is not None:
        pytest.skip("Skip illegal quantization test.")

    a = torch.randn((m, k), device=DEVICE, dtype=torch.bfloat16) / 10
    score = torch.randn((m, e), device=DEVICE, dtype=torch.bfloat16)

    if dtype.itemsize == 1:
        act_dtype = torch.bfloat16
        quant_dtype = dtype
    else:
        act_dtype = dtype
        quant_dtype = None

    (w1_16, w1, w1_s, _), (w2_16, w2, w2_s, _) = make_test_weights(
        e,
        n,
        k,
        block_shape=block_shape,
        in_dtype=act_dtype,
        quant_dtype=quant_dtype,
        per_out_ch_quant=per_act_token_quant,
    )

    if input_scales and quant_dtype is not None:
        a1_scale = torch.tensor(1, device=DEVICE, dtype=torch.float32)
        a2_scale = torch.tensor(1, device=DEVICE, dtype=torch.float32)
    else:
        a1_scale = None
        a2_scale = None

    with set_current_vllm_config(vllm_config):
        topk_weight, topk_ids, _ = fused_topk(a, score, topk, False)

        baseline_output = torch_experts(
            a,
            w1,
            w2,
            topk_weight,
            topk_ids,
            w1_scale=w1_s,
            w2_scale=w2_s,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            quant_dtype=quant_dtype,
            per_act_token_quant=per_act_token_quant,
            block_shape=block_shape,
        )

        batched_output = naive_batched_moe(
            a,
            w1,
            w2,
            topk_weight,
            topk_ids,
            w1_scale=w1_s,
            w2_scale=w2_s,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            quant_dtype=quant_dtype,
            per_act_token_quant=per_act_token_quant,
            block_shape=block_shape,
        )

        triton_output = batched_moe(
            a,
            w1,
            w2,
            topk_weight,
            topk_ids,
            w1_scale=w1_s,
            w2_scale=w2_s,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            quant_dtype=quant_dtype,
            per_act_token_quant=per_act_token_quant,
            block_shape=block_shape,
        )

    torch.testing.assert_close(batched_output, baseline_output, atol=3e-2, rtol=2e-2)

    torch.testing.assert_close(triton_output, batched_output, atol=2e-2, rtol=2e-2)


# USE_TD in moe_mmk

# K % 8 == 0 (bf16, 16-byte alignment)
_TD_SHAPES = [
    (4, 1, 128, 256),
    (8, 64, 512, 512),
    (4, 256, 1024, 2048),
]


def _td_supported() -> bool:
    return current_platform.is_xpu() or (
        current_platform.is_cuda() and current_platform.has_device_capability(90)
    )


def _run_td(A, B, num_expert_tokens, use_td: bool):
    out = torch.zeros(
        A.shape[0],
        A.shape[1],
        B.shape[1],
        dtype=torch.bfloat16,
        device=A.device,
    )
    import triton

    from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import (
        batched_triton_kernel,
    )

    if use_td:
        from vllm.triton_utils.allocation import set_triton_allocator

        set_triton_allocator(A.device)

    E = A.shape[0]
    max_tokens = A.shape[1]
    K = A.shape[2]
    N = B.shape[1]
    BM = BN = BK = 64
    grid = (E, triton.cdiv(max_tokens, BM) * triton.cdiv(N, BN))
    batched_triton_kernel[grid](
        A,
        B,
        out,
        num_expert_tokens,
        tl.bfloat16,
        max_tokens,
        K,
        N,
        None,
        None,
        None,
        A.stride(0),
        A.stride(1),
        A.stride(2),
        B.stride(0),
        B.stride(2),
        B.stride(1),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        False,
        False,
        False,
        BLOCK_M=BM,
        BLOCK_N=BN,
        BLOCK_K=BK,
        USE_TD=use_td,
    )
    return out


@pytest.mark.parametrize("num_experts,max_tokens_per_expert,K,N", _TD_SHAPES)
def test_batched_mm_td_matches_plain(num_experts, max_tokens_per_expert, K, N):
    if not _td_supported():
        pytest.skip("TD requires XPU or CUDA sm_90+")
    set_random_seed(42)
    device = current_platform.device_type
    A = (
        torch.randn(
            num_experts, max_tokens_per_expert, K, device=device, dtype=torch.bfloat16
        )
        / 10
    )
    B = torch.randn(num_experts, N, K, device=device, dtype=torch.bfloat16)
    num_expert_tokens = torch.randint(
        1,
        max_tokens_per_expert + 1,
        size=(num_experts,),
        device=device,
        dtype=torch.int32,
    )

    out_plain = _run_td(A, B, num_expert_tokens, False)
    out_td = _run_td(A, B, num_expert_tokens, True)

    torch.testing.assert_close(out_td, out_plain, atol=6e-2, rtol=6e-2)


def test_batched_mm_td_zero_expert_tokens():
    if not _td_supported():
        pytest.skip("TD requires XPU or CUDA sm_90+")
    set_random_seed(42)
    device = current_platform.device_type
    E, M, K, N = 8, 32, 256, 256
    A = torch.randn(E, M, K, device=device, dtype=torch.bfloat16) / 10
    B = torch.randn(E, N, K, device=device, dtype=torch.bfloat16)
    num_expert_tokens = torch.zeros(E, device=device, dtype=torch.int32)
    num_expert_tokens[::2] = M

    out_plain = _run_td(A, B, num_expert_tokens, False)
    out_td = _run_td(A, B, num_expert_tokens, True)

    for e in range(E):
        if num_expert_tokens[e].item() == 0:
            assert out_plain[e].abs().max().item() == 0.0
            assert out_td[e].abs().max().item() == 0.0

    torch.testing.assert_close(out_td, out_plain, atol=6e-2, rtol=6e-2)


# BatchedTritonExperts device enablement (XPU)
def test_batched_triton_experts_supports_current_device():
    assert BatchedTritonExperts._supports_current_device()


@pytest.mark.parametrize(
    "activation",
    [
        MoEActivation.SITU,
        MoEActivation.SWIGLUOAI_UNINTERLEAVE,
        MoEActivation.SWIGLUSTEP,
    ],
)
def test_batched_triton_supports_masked_activations(
    monkeypatch, activation: MoEActivation
):
    monkeypatch.setattr(current_platform, "is_xpu", lambda: False)
    assert BatchedTritonExperts._supports_activation(activation)

    monkeypatch.setattr(current_platform, "is_xpu", lambda: True)
    assert not BatchedTritonExperts._supports_activation(activation)


def _torch_experts_with_shared_activation(
    a: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: MoEActivation,
    activation_config: ApplyMoEActivationConfig,
) -> torch.Tensor:
    num_tokens, hidden_dim = a.shape
    topk = topk_ids.shape[1]
    routed_input = a[:, None, :].expand(-1, topk, -1).reshape(-1, hidden_dim)
    routed_experts = topk_ids.reshape(-1)
    routed_output = torch.zeros_like(routed_input)

    for expert in range(w1.shape[0]):
        expert_mask = routed_experts == expert
        if not expert_mask.any():
            continue
        projected = routed_input[expert_mask] @ w1[expert].T
        activated = torch.empty(
            projected.shape[0], w2.shape[2], dtype=a.dtype, device=a.device
        )
        apply_moe_activation(
            activation,
            activated,
            projected,
            activation_config=activation_config,
        )
        routed_output[expert_mask] = activated @ w2[expert].T

    return (
        (
            routed_output.view(num_tokens, topk, hidden_dim).float()
            * topk_weights[..., None]
        )
        .sum(dim=1)
        .to(a.dtype)
    )


_MASKED_BATCHED_ACTIVATION_CASES = [
    pytest.param(
        MoEActivation.SITU,
        ApplyMoEActivationConfig(
            activation_situ_beta=1.5,
            activation_situ_linear_beta=2.0,
        ),
        id="situ",
    ),
    pytest.param(
        MoEActivation.SWIGLUOAI_UNINTERLEAVE,
        ApplyMoEActivationConfig(clamp_limit=3.0, alpha=1.3, beta=0.5),
        id="swigluoai-uninterleave",
    ),
    pytest.param(
        MoEActivation.SWIGLUSTEP,
        ApplyMoEActivationConfig(),
        id="swiglustep",
    ),
]


@pytest.mark.parametrize(
    ("activation", "activation_config"), _MASKED_BATCHED_ACTIVATION_CASES
)
@torch.inference_mode()
def test_batched_experts_masked_activation_end_to_end(
    activation: MoEActivation,
    activation_config: ApplyMoEActivationConfig,
):
    if current_platform.is_xpu():
        pytest.skip("Masked activations are not enabled on XPU")

    from vllm.v1.worker.workspace import init_workspace_manager

    set_random_seed(7)
    device = current_platform.device_type
    init_workspace_manager(torch.device(f"{device}:0"))
    m, n, k, e, topk = 16, 128, 128, 8, 2

    a = torch.randn((m, k), device=device, dtype=torch.bfloat16) / 10
    score = torch.randn((m, e), device=device, dtype=torch.bfloat16)
    w1 = torch.randn((e, 2 * n, k), device=device, dtype=torch.bfloat16) / 15
    w2 = torch.randn((e, k, n), device=device, dtype=torch.bfloat16) / 15
    moe_config = make_dummy_moe_config(
        num_experts=e,
        experts_per_token=topk,
        hidden_dim=k,
        intermediate_size=n,
        in_dtype=a.dtype,
        activation=activation,
    )
    moe_config.swiglu_limit = activation_config.clamp_limit
    moe_config.swiglu_alpha = activation_config.alpha
    moe_config.swiglu_beta = activation_config.beta
    moe_config.activation_situ_beta = activation_config.activation_situ_beta
    moe_config.activation_situ_linear_beta = (
        activation_config.activation_situ_linear_beta
    )

    routing_weights = torch.softmax(score.float(), dim=-1)
    topk_weights, topk_ids = torch.topk(routing_weights, topk, dim=-1)
    topk_ids = topk_ids.to(torch.int32)
    with set_current_vllm_config(vllm_config):
        baseline_output = _torch_experts_with_shared_activation(
            a,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            activation_config,
        )
        triton_output = batched_moe(
            a, w1, w2, topk_weights, topk_ids, moe_config=moe_config
        )

    torch.testing.assert_close(triton_output, baseline_output, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("m,n,k,e,topk", [(32, 512, 512, 8, 2), (45, 1024, 128, 8, 1)])
def test_batched_experts_end_to_end(m, n, k, e, topk):
    """End-to-end BatchedTritonExperts via the reference (no-comms)
    BatchedPrepareAndFinalize, validated against a torch reference. Exercises
    the device-enablement path."""
    from vllm.v1.worker.workspace import init_workspace_manager

    set_random_seed(7)
    device = current_platform.device_type
    init_workspace_manager(torch.device(f"{device}:0"))

    a = torch.randn((m, k), device=device, dtype=torch.bfloat16) / 10
    score = torch.randn((m, e), device=device, dtype=torch.bfloat16)
    # w1 is the fused gate+up projection [E, 2N, K]; w2 is [E, K, N].
    w1 = torch.randn((e, 2 * n, k), device=device, dtype=torch.bfloat16) / 15
    w2 = torch.randn((e, k, n), device=device, dtype=torch.bfloat16) / 15

    with set_current_vllm_config(vllm_config):
        topk_weight, topk_ids, _ = fused_topk(a, score, topk, False)

        baseline_output = torch_experts(a, w1, w2, topk_weight, topk_ids)
        triton_output = batched_moe(a, w1, w2, topk_weight, topk_ids)

    torch.testing.assert_close(triton_output, baseline_output, atol=3e-2, rtol=2e-2)


def test_batched_triton_backend_mapping():
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        UnquantizedMoeBackend,
        map_unquantized_backend,
    )

    assert (
        map_unquantized_backend("batched_triton")
        == UnquantizedMoeBackend.BATCHED_TRITON
    )
    assert map_unquantized_backend("triton") == UnquantizedMoeBackend.TRITON
