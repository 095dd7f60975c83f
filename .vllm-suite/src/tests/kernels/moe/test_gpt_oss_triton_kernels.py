# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch
import torch.nn.functional as F

from vllm.platforms import current_platform
from vllm.utils.import_utils import get_triton_kernels_version, has_triton_kernels

if not has_triton_kernels():
    pytest.skip(
        "triton_kernels not found, skipping all related tests",
        allow_module_level=True,
    )

import triton_kernels.swiglu

if get_triton_kernels_version() == "3.8":
    # 3.8: matmul_ogs -> matmul, matmul_ogs_details -> matmul_details
    import triton_kernels.matmul_details.opt_flags as opt_flags
    from triton_kernels.matmul import FlexCtx, PrecisionConfig
else:
    import triton_kernels.matmul_ogs_details.opt_flags as opt_flags
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
from triton_kernels.numerics import InFlexData
from triton_kernels.numerics_details.mxfp import downcast_to_mxfp, upcast_from_mxfp
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details import layout
from triton_kernels.testing import assert_close

from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (
    _sm12x_block_m,
    triton_kernel_moe_forward,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_oracle
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.utils.mxfp4_utils import mx_scale_kwargs
from vllm.utils.math_utils import round_up

from .utils import mxfp4_w_layouts, shuffle_weight


def deshuffle(w: torch.Tensor):
    first = w[..., ::2]
    second = w[..., 1::2]

    deshuffled = torch.concat((first, second), dim=-1)
    return deshuffled


def init_compute_data(M, K, N, E, a_dtype: str, w_dtype: str, num_warps: int):
    randbits = [torch.randperm(E) for _ in range(M)]
    x_list = [
        (-1) ** i
        * ((16384 + ((i * 512) % 4096) + bits).to(torch.int16).view(torch.bfloat16))
        for i, bits in enumerate(randbits)
    ]
    exp_data = torch.stack(x_list).to(device="cuda")  # simulating gate_output (M, E)

    # create input tensor
    x = torch.randn((M, K), dtype=torch.bfloat16, device="cuda")
    w1 = torch.randn((E, 2 * N, K), dtype=torch.bfloat16, device="cuda")
    w1_bias = torch.randn((E, 2 * N), dtype=torch.bfloat16, device="cuda")

    w2 = torch.randn((E, K, N), dtype=torch.bfloat16, device="cuda")
    w2_bias = torch.randn((E, K), dtype=torch.bfloat16, device="cuda")

    exp_data_tri = exp_data.clone()
    x_tri = x.clone()
    w1_tri = w1.clone()
    w2_tri = w2.clone()

    w1_bias_tri = w1_bias.clone()
    w2_bias_tri = w2_bias.clone()
    w1_bias_tri = w1_bias_tri.to(torch.float32)
    w2_bias_tri = w2_bias_tri.to(torch.float32)

    dtype_dict = {
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }

    x = x.to(dtype_dict[a_dtype]).to(torch.bfloat16)
    if w_dtype != "mx4":
        # simulate quantization support on reference impl
        w1 = w1.to(dtype_dict[w_dtype]).to(torch.bfloat16)
        w2 = w2.to(dtype_dict[w_dtype]).to(torch.bfloat16)

    # triton moe kernel use transposed shape for matmul
    w1_tri = w1_tri.transpose(-2, -1)
    w2_tri = w2_tri.transpose(-2, -1)

    # shuffle weights
    w1_tri = shuffle_weight(w1_tri)
    w1_bias_tri = shuffle_weight(w1_bias_tri)

    # quant triton_weights
    x_tri = x.to(dtype_dict[a_dtype])
    if w_dtype != "mx4":
        pytest.skip("NYI")
    else:  # quantize to mx4
        # Padding alignment depends on the platform.  On CDNA4 the scale
        # swizzle requires SCALE_K % 8 == 0 (K % 256) and
        # SCALE_N % 32 == 0 (2*N % 512), matching the production
        # alignment in mxfp4_round_up_hidden_size_and_intermediate_size.
        # On CUDA (Hopper) the scale layout pads internally, so the
        # original 64/128 alignment is sufficient.
        if current_platform.is_rocm():
            k_align, n2_align = 256, 512
        else:
            k_align, n2_align = 64, 128
        w1_bottom_pad = round_up(w1_tri.shape[1], k_align) - w1_tri.shape[1]
        w1_right_pad = round_up(w1_tri.shape[2], n2_align) - w1_tri.shape[2]

        w2_bottom_pad = w1_right_pad // 2
        w2_right_pad = w1_bottom_pad

        x_pad = w1_bottom_pad

        w1_tri = F.pad(
            w1_tri,
            (0, w1_right_pad, 0, w1_bottom_pad, 0, 0),
            mode="constant",
            value=0,
        )
        w2_tri = F.pad(
            w2_tri,
            (0, w2_right_pad, 0, w2_bottom_pad, 0, 0),
            mode="constant",
            value=0,
        )

        w1_bias_tri = F.pad(
            w1_bias_tri, (0, w1_right_pad, 0, 0), mode="constant", value=0
        )
        w2_bias_tri = F.pad(
            w2_bias_tri, (0, w2_right_pad, 0, 0), mode="constant", value=0
        )

        x_tri = F.pad(x_tri, (0, x_pad, 0, 0), mode="constant", value=0)

        (
            w_layout,
            w_layout_opts,
            w_scale_layout,
            w_scale_layout_opts,
        ) = mxfp4_w_layouts(mx_axis=1, num_warps=num_warps)

        w1_tri, w1_scale_tri = downcast_to_mxfp(w1_tri, torch.uint8, axis=1)
        w1 = upcast_from_mxfp(w1_tri, w1_scale_tri, torch.bfloat16, axis=1)

        w2_tri, w2_scale_tri = downcast_to_mxfp(w2_tri, torch.uint8, axis=1)
        w2 = upcast_from_mxfp(w2_tri, w2_scale_tri, torch.bfloat16, axis=1)

        w1_tri = convert_layout(
            wrap_torch_tensor(w1_tri, FP4), w_layout, **w_layout_opts
        )
        w1_scale_tri = convert_layout(
            wrap_torch_tensor(w1_scale_tri),
            w_scale_layout,
            **w_scale_layout_opts,
        )

        w2_tri = convert_layout(
            wrap_torch_tensor(w2_tri, FP4), w_layout, **w_layout_opts
        )
        w2_scale_tri = convert_layout(
            wrap_torch_tensor(w2_scale_tri),
            w_scale_layout,
            **w_scale_layout_opts,
        )

        pc1 = PrecisionConfig(
            **mx_scale_kwargs(w1_scale_tri), flex_ctx=FlexCtx(rhs_data=InFlexData())
        )
        pc2 = PrecisionConfig(
            **mx_scale_kwargs(w2_scale_tri), flex_ctx=FlexCtx(rhs_data=InFlexData())
        )

        # tucuate so the rest can run properly
        w1 = w1[..., :K, : 2 * N]
        w2 = w2[..., :N, :K]

        w1 = deshuffle(w1)

        w1 = w1.transpose(-1, -2).contiguous()
        w2 = w2.transpose(-1, -2).contiguous()

        return (
            x,
            w1,
            w1_bias,
            w2,
            w2_bias,
            exp_data,
            x_tri,
            w1_tri,
            w2_tri,
            exp_data_tri,
            w1_bias_tri,
            w2_bias_tri,
            pc1,
            pc2,
        )


@dataclass
class ModelConfig:
    num_hidden_layers: int = 36
    num_experts: int = 128
    experts_per_token: int = 4
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    head_dim: int = 64
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    sliding_window: int = 128
    initial_context_length: int = 4096
    rope_theta: float = 150000.0
    rope_parameters_factor: float = 32.0
    rope_ntk_alpha: float = 1.0
    rope_ntk_beta: float = 32.0


def swiglu(x, alpha: float = 1.702, limit: float = 1.0):
    # Note we add an extra bias of 1 to the linear layer
    x_glu, x_linear = torch.chunk(x, 2, dim=-1)
    if limit is not None:
        x_glu = x_glu.clamp(max=limit)
    out_glu = x_glu * torch.sigmoid(alpha * x_glu)
    if limit is not None:
        x_linear = x_linear.clamp(min=-limit, max=limit)
    return out_glu * (x_linear + 1)


def oai_moe_forward(
    hidden_states: torch.Tensor,  # (M, K)
    w1: torch.Tensor,  # (E, 2N)
    w1_bias: torch.Tensor,  # (E, 2N, K)
    w2: torch.Tensor,  # (E, K, N)
    w2_bias: torch.Tensor,  # (E, N)
    gating_output: torch.Tensor,  # (M, E)
    topk: int,
):
    # model.py 309:330, assuming gating and norm
    t = hidden_states
    experts = torch.topk(gating_output, k=topk, dim=-1, sorted=True)
    expert_weights = torch.nn.functional.softmax(experts.values, dim=1)
    expert_indices = experts.indices

    # MLP #1
    mlp1_weight = w1[expert_indices, ...]
    mlp1_bias = w1_bias[expert_indices, ...]
    t = torch.einsum("beck,bk->bec", mlp1_weight, t) + mlp1_bias
    t = swiglu(t, limit=7)

    # MLP #2
    mlp2_weight = w2[expert_indices, ...]
    mlp2_bias = w2_bias[expert_indices, ...]
    t = torch.einsum("beck,bek->bec", mlp2_weight, t)
    t += mlp2_bias

    # Weighted sum of experts
    t = torch.einsum("bec,be->bc", t, expert_weights)

    return t


@dataclass
class Case:
    a_dtype: str
    w_dtype: str


@pytest.mark.parametrize(
    ", ".join(f.name for f in fields(Case)),
    [
        tuple(getattr(case, f.name) for f in fields(Case))
        for case in [
            # Case(a_dtype="bf16", w_dtype="bf16"),
            # Case(a_dtype="fp8_e4m3", w_dtype="fp8_e5m2"),
            Case(a_dtype="bf16", w_dtype="mx4")
        ]
    ],
)
@pytest.mark.parametrize("num_token", [2])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_equiv(num_token, a_dtype, w_dtype, tp, workspace_init):
    if not hasattr(layout, "make_default_matmul_mxfp4_w_layout"):
        pytest.skip("make_default_matmul_mxfp4_w_layout not available")

    M = num_token
    E = ModelConfig.num_experts
    K = ModelConfig.hidden_size
    N = ModelConfig.intermediate_size // tp
    topk = ModelConfig.experts_per_token

    (
        x,
        w1,
        w1_bias,
        w2,
        w2_bias,
        exp_data,
        x_tri,
        w1_tri,
        w2_tri,
        exp_data_tri,
        w1_bias_tri,
        w2_bias_tri,
        pc1,
        pc2,
    ) = init_compute_data(M, K, N, E, a_dtype, w_dtype, num_warps=8)

    if current_platform.is_device_capability_family(
        100
    ) or current_platform.is_device_capability_family(120):
        # Mirrors `_swizzle_mxfp4`; SM12x also needs epilogue_subtile=1.
        constraints = {
            "is_persistent": True,
            "epilogue_subtile": 1,
        }
        opt_flags.update_opt_flags_constraints(constraints)

    if a_dtype == "bf16" and w_dtype == "mx4":
        quant_config = mxfp4_w4a16_moe_quant_config(
            w1_scale=pc1,
            w2_scale=pc2,
            w1_bias=w1_bias_tri,
            w2_bias=w2_bias_tri,
        )
    else:
        raise NotImplementedError(
            f"Quantization configuration for activation={a_dtype} and weight={w_dtype} "
            f"has not been implemented."
        )

    out_triton_monolithic = triton_kernel_moe_forward(
        hidden_states=x_tri,
        w1=w1_tri,
        w2=w2_tri,
        gating_output=exp_data_tri,
        topk=topk,
        renormalize=True,
        quant_config=quant_config,
    )
    out_triton_monolithic = out_triton_monolithic[..., :K]

    out_ref = oai_moe_forward(
        hidden_states=x,
        w1=w1,
        w1_bias=w1_bias,
        w2=w2,
        w2_bias=w2_bias,
        gating_output=exp_data,
        topk=topk,
    )
    assert_close(ref=out_ref, tri=out_triton_monolithic, maxtol=0.025, rmstol=0.005)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "expected"),
    [
        (4, 32, 16),  # bs=1 decode: below the 16-row floor
        (32 * 20, 32, 32),  # 20 tokens/expert rounds up to 32
        (32 * 33, 32, 32),  # heuristic would pick 64; capped for 99KB smem
        (12000, 32, 32),  # prefill: heuristic would pick 128
    ],
)
def test_sm12x_block_m(num_rows, num_experts, expected):
    assert _sm12x_block_m(num_rows, num_experts) == expected


@pytest.mark.parametrize("sm12x", [True, False])
def test_gpt_oss_priority_prefers_marlin_on_sm12x(
    monkeypatch: pytest.MonkeyPatch, sm12x: bool
):
    """SM12x runs the OAI Triton kernels at small tiles only, so MARLIN must
    stay the default there while TRITON remains selectable explicitly."""
    monkeypatch.setattr(mxfp4_oracle.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(
        mxfp4_oracle.current_platform,
        "is_device_capability_family",
        lambda family: sm12x and family == 120,
    )
    order = mxfp4_oracle._get_priority_backends_for_gpt_oss()
    triton_first = order.index(Mxfp4MoeBackend.TRITON) < order.index(
        Mxfp4MoeBackend.MARLIN
    )
    assert triton_first is not sm12x


def test_unit_shuffle():
    N = ModelConfig.intermediate_size
    K = ModelConfig.hidden_size
    m = torch.randn((K, 2 * N), dtype=torch.bfloat16, device="cuda")

    x = torch.randn(K, dtype=torch.bfloat16, device="cuda")

    m_shuffled = shuffle_weight(m)

    out_ref = x @ m
    out_ref = swiglu(out_ref, limit=1.0)

    out = x @ m_shuffled
    out = triton_kernels.swiglu.swiglu_torch(
        out,
        alpha=1.702,
        precision_config=triton_kernels.swiglu.PrecisionConfig(limit=1.0),
    )

    assert_close(ref=out_ref, tri=out)


@pytest.mark.parametrize("n_tokens", [1, 33, 512])
@pytest.mark.parametrize("n_experts,topk", [(32, 4), (128, 4)])
def test_routing_data_from_sparse_topk_parity(n_tokens, n_experts, topk):
    """routing_data_from_sparse_topk must produce routing structures
    identical to make_routing_data for the same topk result."""
    from vllm.model_executor.layers.fused_moe.experts import (
        gpt_oss_triton_kernels_moe as gptoss_moe,
    )

    make_routing_data = gptoss_moe.make_routing_data
    routing_data_from_sparse_topk = gptoss_moe.routing_data_from_sparse_topk

    if gptoss_moe.triton_kernels_version == "3.5.1":
        pytest.skip("SparseMatrix path requires triton_kernels v3.6.0+")

    from triton_kernels.topk import topk as topk_fn

    torch.manual_seed(0)
    logits = torch.randn(n_tokens, n_experts, dtype=torch.bfloat16, device="cuda")
    sparse_topk = topk_fn(logits, topk, apply_softmax=True)
    assert not isinstance(sparse_topk, tuple)

    rd_new, gather_new, scatter_new = routing_data_from_sparse_topk(
        sparse_topk, n_experts
    )
    rd_ref, gather_ref, scatter_ref = make_routing_data(
        sparse_topk.indx.to(torch.long), sparse_topk.vals, n_experts
    )

    def assert_equivalent(new, ref, path="RoutingData"):
        """Recursively compare tensor-valued leaves of routing structures."""
        if isinstance(ref, torch.Tensor):
            torch.testing.assert_close(new, ref, msg=lambda m: f"{path}: {m}")
        elif isinstance(ref, (int, float, bool, str)) or ref is None:
            assert new == ref, f"{path}: {new!r} != {ref!r}"
        elif is_dataclass(ref):
            for f in fields(ref):
                assert_equivalent(
                    getattr(new, f.name), getattr(ref, f.name), f"{path}.{f.name}"
                )
        elif callable(ref):
            assert callable(new), f"{path}: callable vs {type(new)}"
        elif hasattr(ref, "__dict__"):
            for k, v in vars(ref).items():
                assert_equivalent(getattr(new, k), v, f"{path}.{k}")
        elif hasattr(type(ref), "__slots__"):
            for k in type(ref).__slots__:
                assert_equivalent(getattr(new, k), getattr(ref, k), f"{path}.{k}")
        else:
            assert type(new) is type(ref), f"{path}: {type(new)} vs {type(ref)}"

    assert_equivalent(rd_new, rd_ref)
    if isinstance(gather_ref, torch.Tensor):
        torch.testing.assert_close(gather_new, gather_ref)
        torch.testing.assert_close(scatter_new, scatter_ref)
        return
    torch.testing.assert_close(gather_new.src_indx, gather_ref.src_indx)
    torch.testing.assert_close(gather_new.dst_indx, gather_ref.dst_indx)
    torch.testing.assert_close(scatter_new.src_indx, scatter_ref.src_indx)
    torch.testing.assert_close(scatter_new.dst_indx, scatter_ref.dst_indx)


@pytest.mark.parametrize("n_tokens", [1, 33, 4099])
@pytest.mark.parametrize("n_experts,topk", [(128, 4), (256, 6)])
def test_make_routing_data_tk38_matches_reference(n_tokens, n_experts, topk):
    from vllm.model_executor.layers.fused_moe.experts import (
        gpt_oss_triton_kernels_moe as gptoss_moe,
    )

    if gptoss_moe.triton_kernels_version != "3.8":
        pytest.skip("requires triton_kernels 3.8")

    torch.manual_seed(0)
    topk_ids = torch.stack(
        [torch.randperm(n_experts, device="cuda")[:topk] for _ in range(n_tokens)]
    ).to(torch.int32)
    topk_ids[torch.rand(topk_ids.shape, device="cuda") < 0.5] = -1
    topk_weights = torch.rand(topk_ids.shape, device="cuda")

    routing, gather_tok, scatter_tok = gptoss_moe.make_routing_data(
        topk_ids, topk_weights, n_experts
    )

    flat = topk_ids.reshape(-1).to(torch.int64)
    order = torch.argsort(flat.clamp(min=0), stable=True)
    counts = torch.bincount(flat.clamp(min=0), minlength=n_experts).to(torch.int32)
    weights = topk_weights.reshape(-1) * (flat >= 0).to(torch.float32)

    assert torch.equal(routing.ragged.slice_sizes, counts)
    assert torch.equal(gather_tok, (order // topk).to(torch.int32))
    assert torch.equal(scatter_tok, gather_tok)
    assert torch.equal(routing.gate_scal, weights[order])
    assert routing.n_expts_act == topk
    assert routing.n_valid == flat.numel()
