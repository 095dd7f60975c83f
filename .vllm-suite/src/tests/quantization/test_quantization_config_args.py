# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Unit tests for QuantizationConfigArgs parsing."""

import pytest

from tests.quantization.utils import quant_config_args, quant_spec
from vllm.config.quantization import (
    QUANT_KEY_NAMES,
    QuantizationConfigArgs,
    QuantSpec,
    resolve_quantization_config,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
    _find_matching_targets,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kInt4Static32,
    kInt8StaticChannelSym,
    kMxfp8Dynamic,
    kNvfp4DynamicToken,
    kNvfp4Static,
)

# ---- QuantSpec ------------------------------------------------------------


def test_quant_spec_resolves_string_to_quant_key():
    spec = quant_spec(weight="mxfp8", activation="fp8_per_token")
    assert spec.weight == kMxfp8Dynamic
    assert spec.activation == kFp8DynamicTokenSym


def test_quant_spec_accepts_quant_key_directly():
    spec = QuantSpec(weight=kFp8StaticTensorSym)
    assert spec.weight is kFp8StaticTensorSym
    assert spec.activation is None


def test_quant_spec_string_representation_uses_quantization_name():
    assert str(quant_spec(weight="mxfp4")) == "mxfp4"


def test_quant_spec_resolves_groupwise_int4_weight():
    spec = QuantSpec(weight="int4_per_group_32")
    assert spec.weight == kInt4Static32
    assert spec.activation is None


def test_quant_spec_rejects_unknown_name():
    with pytest.raises(ValueError, match="unknown quantization name"):
        quant_spec(weight="not_a_real_format")


# ---- QuantizationConfigArgs string shorthand on linear/moe ----------------


def test_args_linear_string_resolves_via_quant_key_names():
    # A bare QUANT_KEY_NAMES entry desugars to QuantSpec(weight=<key>).
    args = quant_config_args(linear="fp8_per_block_static")
    assert args.linear == QuantSpec(weight=kFp8Static128BlockSym)
    assert args.moe is None


@pytest.mark.parametrize(
    "shorthand,weight",
    [("fp8_per_block", kFp8Static128BlockSym), ("nvfp4_per_token", kNvfp4Static)],
)
def test_args_moe_string_resolves_via_online_shorthand(shorthand, weight):
    # An online-shorthand name pulls the matching slot from _ONLINE_SHORTHANDS
    # (so `linear: "fp8_per_block"` and `moe: "fp8_per_block"` produce the
    # same per-layer-kind spec the `--quantization fp8_per_block` shorthand
    # would).
    args = quant_config_args(moe=shorthand)
    assert args.moe == QuantSpec(weight=weight)


def test_args_string_shorthand_missing_slot_raises():
    # int8_per_channel_weight_only sets only `moe`; using it on `linear`
    # has no defined spec and should raise rather than silently no-op.
    with pytest.raises(ValueError, match="does not define a linear spec"):
        quant_config_args(linear="int8_per_channel_weight_only")


@pytest.mark.parametrize(
    "activation,expected",
    [("mxfp8", kMxfp8Dynamic), ("nvfp4_per_token", kNvfp4DynamicToken)],
)
def test_args_accepts_dict_form(activation, expected):
    args = quant_config_args(moe={"activation": activation})
    assert args.moe == QuantSpec(weight=None, activation=expected)
    assert args.linear is None


def test_targets_reject_non_string_keys():
    with pytest.raises(ValueError, match="targets keys must be strings"):
        QuantizationConfigArgs._validate_targets({123: "mxfp8"})


# ---- resolve_quantization_config -----------------------------------------


def test_resolve_shorthand_only_populates_both_slots():
    args = resolve_quantization_config("fp8_per_block", None)
    assert args is not None
    assert args.linear == QuantSpec(weight=kFp8Static128BlockSym)
    assert args.moe == QuantSpec(weight=kFp8Static128BlockSym)


@pytest.mark.parametrize("quantization", ["mxfp4", "mxfp8"])
def test_resolve_colliding_shorthand_is_deferred(quantization: str):
    """Checkpoint metadata determines whether an MXFP shorthand is online."""
    assert resolve_quantization_config(quantization, None) is None


@pytest.mark.parametrize(
    "shorthand,weight",
    [
        ("int8_per_channel_weight_only", kInt8StaticChannelSym),
        ("nvfp4_per_token", kNvfp4Static),
    ],
)
def test_resolve_moe_only_shorthand_leaves_linear_unset(shorthand, weight):
    args = resolve_quantization_config(shorthand, None)
    assert args is not None
    assert args.linear is None
    assert args.moe == QuantSpec(weight=weight)


@pytest.mark.parametrize("quantization", [None, "modelopt_fp4"])
@pytest.mark.parametrize(
    "activation,expected",
    [("mxfp8", kMxfp8Dynamic), ("nvfp4_per_token", kNvfp4DynamicToken)],
)
def test_resolve_activation_override(quantization, activation, expected):
    # When only `quantization_config` is given (e.g. for an already-quantized
    # checkpoint that needs an activation override), it's returned as-is.
    args = resolve_quantization_config(
        quantization, {"moe": {"activation": activation}}
    )
    assert args is not None
    assert args.linear is None
    assert args.moe == QuantSpec(weight=None, activation=expected)


def test_resolve_merges_explicit_over_shorthand():
    # Explicit linear in quantization_config wins; moe falls back to the
    # shorthand's slot.
    args = resolve_quantization_config(
        "fp8_per_tensor",
        {"linear": "fp8_per_block"},
    )
    assert args is not None
    assert args.linear == QuantSpec(weight=kFp8Static128BlockSym)
    assert args.moe == QuantSpec(weight=kFp8StaticTensorSym)


def test_resolve_quantization_config_with_checkpoint_quantization():
    args = resolve_quantization_config("gptq", {"linear": "fp8_per_block"})
    assert args == quant_config_args(linear="fp8_per_block")


# ---- QUANT_KEY_NAMES coverage --------------------------------------------


def test_quant_key_names_round_trip():
    # Every advertised name should round-trip through QuantSpec without error
    # and produce the same QuantKey it maps to.
    for name, expected in QUANT_KEY_NAMES.items():
        assert quant_spec(weight=name).weight == expected, name
        assert quant_spec(activation=name).activation == expected, name


def test_static_block_weight_paired_with_dynamic_block_activation():
    # The block-FP8 shorthand pair: 128x128 static weights + 1x128 dynamic
    # activations. Pinning this so renames in QUANT_KEY_NAMES don't quietly
    # rewire the kernel dispatch.
    spec = quant_spec(weight="fp8_per_block_static", activation="fp8_per_block_dynamic")
    assert spec.weight == kFp8Static128BlockSym
    assert spec.activation == kFp8Dynamic128Sym


def test_targets_allow_distinct_patterns_with_the_same_shorthand():
    layer_name = "model.layers.0.self_attn.qkv_proj"
    fused_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    targets = {
        r"re:.*\.q_proj$": "mxfp8",
        r"re:.*\.k_proj$": "mxfp8",
        r"re:.*\.v_proj$": "mxfp8",
    }

    matches = _find_matching_targets(layer_name, targets, fused_mapping)
    assert len(matches) == 1
    assert targets[matches[0]] == "mxfp8"


def test_targets_reject_overlapping_patterns():
    targets = {
        r"re:.*o_proj": "fp8_per_tensor",
        "model.layers.0.self_attn.o_proj": "fp8_per_block",
    }

    with pytest.raises(ValueError, match="multiple quantization_config.targets"):
        _find_matching_targets("model.layers.0.self_attn.o_proj", targets)


def test_targets_reject_partially_matched_fused_layer():
    targets = {r"re:.*q_proj": "fp8_per_tensor"}
    fused_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    with pytest.raises(ValueError, match="unmatched shards"):
        _find_matching_targets(
            "model.layers.0.self_attn.qkv_proj", targets, fused_mapping
        )


def test_targets_reject_fused_shards_with_different_schemes():
    targets = {
        r"re:.*\.q_proj$": "fp8_per_tensor",
        r"re:.*\.k_proj$": "fp8_per_block",
        r"re:.*\.v_proj$": "fp8_per_tensor",
    }
    fused_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    with pytest.raises(ValueError, match="different quantization_config.targets"):
        _find_matching_targets(
            "model.layers.0.self_attn.qkv_proj", targets, fused_mapping
        )


def test_targets_reject_moe_only_shorthand_for_linear_layer():
    config = OnlineQuantizationConfig(
        QuantizationConfigArgs(
            targets={"model.layers.0.self_attn.o_proj": "nvfp4_per_token"}
        )
    )

    with pytest.raises(ValueError, match="does not define a QuantSpec"):
        config.resolve_quant_method_cls(LinearBase, "model.layers.0.self_attn.o_proj")
