# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests that the auto_gptq quantization method works correctly.

Run `pytest tests/quantization/test_auto_gptq.py -v -s`.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.quantization.utils import (
    is_quant_method_supported,
    load_model_without_vllm_runner,
)
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.auto_gptq import (
    AutoGPTQConfig,
    AutoGPTQLinearMethod,
    AutoGPTQMoEMethod,
)
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    is_layer_gptq_quantized,
    override_config,
)
from vllm.platforms import current_platform

PROMPT = "On the surface of Mars, we found"

MODELS = [
    "LnL-AI/TinyLlama-1.1B-Chat-v1.0-GPTQ-4bit",
]


@pytest.mark.skipif(
    not is_quant_method_supported("auto_gptq"),
    reason="auto_gptq is not supported on this GPU type.",
)
@pytest.mark.parametrize("model_id", MODELS)
def test_auto_gptq_quantization_method(
    model_id: str, monkeypatch, dist_init, workspace_init
):
    """Test that quantization='auto_gptq' loads and runs correctly."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model, vllm_config = load_model_without_vllm_runner(
        model_id,
        dtype=torch.float16,
        quantization="auto_gptq",
        model_config_kwargs={"max_model_len": 2048},
    )

    qkv_proj = model.model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv_proj.quant_method, AutoGPTQLinearMethod)

    target_device = torch.device(current_platform.device_type)
    monkeypatch.setattr(Attention, "forward", lambda _, q, k, v: q.contiguous())
    input_ids = torch.tensor([1, 2, 3, 4], device=target_device)
    positions = torch.arange(input_ids.numel(), device=target_device)
    with (
        set_current_vllm_config(vllm_config),
        set_forward_context(None, vllm_config, num_tokens=input_ids.numel()),
    ):
        hidden_states = model(input_ids, positions, None)
        logits = model.compute_logits(hidden_states)
    assert torch.isfinite(logits).all()


def test_auto_gptq_config_get_name():
    """Test that AutoGPTQConfig.get_name() returns 'auto_gptq'."""
    assert AutoGPTQConfig.get_name() == "auto_gptq"


def test_auto_gptq_quantizes_every_layer_when_the_module_list_is_unknown():
    """An empty module list means the safetensors metadata could not be read,
    not that the checkpoint holds no quantized layer."""
    assert is_layer_gptq_quantized(
        prefix="model.layers.0.mlp.down_proj",
        quantized_layers=[],
    )
    assert not is_layer_gptq_quantized(
        prefix="model.layers.0.mlp.down_proj",
        quantized_layers=["self_attn.q_proj"],
    )


@pytest.mark.parametrize(
    "dynamic",
    [
        {},
        {r"+:model\.layers\.0\..*": {"desc_act": True}},
        {
            r"+:model\.layers\.0\..*": {
                "desc_act": True,
                "group_size": 32,
            }
        },
    ],
)
def test_auto_gptq_rejects_group_activation_order(dynamic):
    desc_act = not dynamic
    with pytest.raises(ValueError, match="group activation ordering"):
        AutoGPTQConfig(4, 128, desc_act, True, False, dynamic, {})


def test_auto_gptq_normalizes_channelwise_activation_order():
    config = AutoGPTQConfig(4, -1, True, True, False, {}, {})
    assert not config.desc_act

    config = AutoGPTQConfig(
        4,
        128,
        False,
        True,
        False,
        {r"+:model\.layers\.0\..*": {"desc_act": True, "group_size": -1}},
        {},
    )
    override_config(config, "model.layers.0.self_attn.q_proj")
    assert config.group_size == -1
    assert not config.desc_act

    with pytest.raises(ValueError, match="group activation ordering"):
        AutoGPTQConfig(
            4,
            -1,
            True,
            True,
            False,
            {r"+:model\.layers\.0\..*": {"group_size": 128}},
            {},
        )


def test_auto_gptq_moe_creates_zero_initialized_expert_biases():
    method = object.__new__(AutoGPTQMoEMethod)
    method.quant_config = AutoGPTQConfig(4, 128, False, True, False, {}, {})
    method.input_dtype = None
    method.experts_cls = None
    method.moe = SimpleNamespace(w13_num_shards=2)
    layer = torch.nn.Module()

    method.create_weights(
        layer=layer,
        num_experts=2,
        hidden_size=8,
        intermediate_size_per_partition=4,
        params_dtype=torch.float16,
        weight_loader=lambda *args, **kwargs: None,
    )

    assert layer.w13_bias.shape == (2, 8)
    assert layer.w2_bias.shape == (2, 8)
    assert torch.count_nonzero(layer.w13_bias) == 0
    assert torch.count_nonzero(layer.w2_bias) == 0


def test_routed_experts_loads_per_expert_biases():
    class Loader:
        quant_config = None
        quant_method = object()
        _fused_shared_expert_quantizer = None
        moe_config = SimpleNamespace(
            is_act_and_mul=True,
            tp_rank=0,
            moe_parallel_config=SimpleNamespace(tp_size=1),
        )
        _get_hidden_dim = staticmethod(RoutedExperts._get_hidden_dim)
        _narrow_expert_data_for_padding = staticmethod(
            RoutedExperts._narrow_expert_data_for_padding
        )
        _load_w13 = RoutedExperts._load_w13
        _loaded_expert_biases = set()

        @staticmethod
        def _map_global_expert_id_to_local_expert_id(expert_id):
            return expert_id

    loader = Loader()
    w13_bias = torch.nn.Parameter(torch.zeros(1, 8), requires_grad=False)
    w2_bias = torch.nn.Parameter(torch.zeros(1, 4), requires_grad=False)

    for shard_id, loaded in (
        ("w1", torch.tensor([1.0, 2.0, 3.0, 4.0])),
        ("w3", torch.tensor([5.0, 6.0, 7.0, 8.0])),
    ):
        assert RoutedExperts.weight_loader(  # type: ignore[call-overload]
            loader,
            w13_bias,
            loaded,
            weight_name="model.layers.0.mlp.experts.w13_bias",
            shard_id=shard_id,
            expert_id=0,
            return_success=True,
        )

    assert RoutedExperts.weight_loader(  # type: ignore[call-overload]
        loader,
        w2_bias,
        torch.tensor([9.0, 10.0, 11.0, 12.0]),
        weight_name="model.layers.0.mlp.experts.w2_bias",
        shard_id="w2",
        expert_id=0,
        return_success=True,
    )
    assert torch.equal(w13_bias, torch.arange(1, 9, dtype=torch.float32).reshape(1, 8))
    assert torch.equal(w2_bias, torch.arange(9, 13, dtype=torch.float32).reshape(1, 4))
    assert loader._loaded_expert_biases == {"w13_bias", "w2_bias"}
