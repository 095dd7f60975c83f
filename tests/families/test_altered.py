"""Each altered key of a family's config.json is right, as transformers is, or refused by name; never wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.altered_config import GONE, Case, altered, verdict

RIGHT, REFUSED = "right", "refused"
Cases = list[tuple[str, Any, str]]
SIZES: Cases = [  # the EOS of generation_config.json counts before that of config.json
    ("vocab_size", 0, REFUSED), ("vocab_size", 100_000, REFUSED), ("vocab_size", True, REFUSED),
    ("architectures", ["BloomForCausalLM"], REFUSED), ("architectures", 5, REFUSED), ("model_type", "bloom", REFUSED),
    ("dtype", "int8", REFUSED), ("eos_token_id", [2, 3], RIGHT), ("eos_token_id", 10**6, RIGHT),
    ("bos_token_id", 5, RIGHT), ("use_cache", False, RIGHT), ("an_unknown_key", {"a": 1}, RIGHT),
    ("tie_word_embeddings", "yes", REFUSED), ("quantization_config", {"quant_method": "aqlm"}, REFUSED),
    ("initializer_range", 0.5, RIGHT),
]  # fmt: skip
GATED: Cases = [
    *SIZES, ("hidden_act", "gelu", RIGHT), ("hidden_act", "relu", RIGHT), ("hidden_act", "quick_gelu", RIGHT),
    ("hidden_act", "gelu_pytorch_tanh", RIGHT), ("hidden_act", "gelu_new", RIGHT), ("hidden_act", "tanh", REFUSED),
    ("hidden_act", None, REFUSED), ("rms_norm_eps", 1e-3, RIGHT), ("rms_norm_eps", 0, REFUSED),
    ("num_attention_heads", 0, REFUSED), ("num_attention_heads", 8, REFUSED), ("num_key_value_heads", 3, REFUSED),
    ("num_key_value_heads", 1, REFUSED), ("head_dim", 8, REFUSED), ("head_dim", 15, REFUSED),
    ("num_hidden_layers", 9, REFUSED), ("intermediate_size", 100, REFUSED), ("hidden_size", 128, REFUSED),
    ("max_position_embeddings", 512, RIGHT), ("rope_parameters.rope_theta", 5e4, RIGHT),
    ("rope_parameters.rope_theta", 0, REFUSED), ("rope_parameters.rope_type", "longrope", REFUSED),
    ("rope_parameters.partial_rotary_factor", 0.5, REFUSED), ("attention_dropout", 0.5, RIGHT),
    ("rope_parameters", {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}, RIGHT),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}, RIGHT),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 0.5, "rope_theta": 1e4}, REFUSED),
]  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
YARNS: Cases = [
    ("rope_parameters", {**YARN, **more}, expected)
    for more, expected in (
        ({}, RIGHT), ({"beta_fast": 16, "beta_slow": 2}, RIGHT), ({"beta_fast": 1, "beta_slow": 2}, REFUSED),
        ({"attention_factor": 1.7}, RIGHT), ({"attention_factor": -1.0}, REFUSED), ({"truncate": False}, RIGHT),
        ({"truncate": "no"}, REFUSED), ({"mscale": 0.7, "mscale_all_dim": 1.3}, RIGHT), ({"mscale": 0.7}, RIGHT),
        ({"factor": 0.5}, REFUSED), ({"factor": None}, REFUSED), ({"original_max_position_embeddings": 0}, REFUSED),
        ({"original_max_position_embeddings": 2048}, RIGHT), ({"beta_fast": None}, RIGHT), ({"factor": 1.0}, RIGHT),
    )
]  # fmt: skip
CASES: dict[str, tuple[str, Cases]] = {
    "qwen3": ("plain", [
        *GATED, *YARNS, ("attention_bias", True, REFUSED), ("use_sliding_window", True, RIGHT),
        ("sliding_window", 4, RIGHT), ("layer_types", ["sliding_attention"] * 2, REFUSED), ("head_dim", GONE, REFUSED),
        ("max_window_layers", 0, RIGHT), ("max_window_layers", "all", REFUSED),
        ("layer_types", ["chunked_attention"] * 2, REFUSED), ("layer_types", None, RIGHT),
        ("num_key_value_heads", None, REFUSED), ("num_hidden_layers", 1, REFUSED), ("tie_word_embeddings", GONE, RIGHT),
    ]),
    "qwen3 with windows": ("window in the second layer", [
        ("sliding_window", 5, RIGHT), ("sliding_window", None, REFUSED), ("sliding_window", 0, REFUSED),
        ("sliding_window", GONE, RIGHT), ("use_sliding_window", False, REFUSED), ("use_sliding_window", 1, REFUSED),
        ("max_window_layers", 0, RIGHT), ("max_window_layers", -1, REFUSED), ("layer_types", None, RIGHT),
        ("layer_types", ["sliding_attention", "full_attention"], RIGHT), ("layer_types", "full_attention", REFUSED),
        ("layer_types", ["full_attention"] * 2, RIGHT), ("layer_types", ["sliding_attention"], REFUSED),
        ("is_causal", False, REFUSED),
    ]),
    "gemma3": ("windows of 8, four layers", [
        *SIZES, ("hidden_activation", "gelu", RIGHT), ("hidden_activation", "silu", RIGHT),
        ("hidden_activation", "relu", RIGHT), ("hidden_activation", GONE, RIGHT),
        ("hidden_activation", "tanh", REFUSED),
        ("hidden_act", "silu", RIGHT), ("rms_norm_eps", 1e-3, RIGHT), ("rms_norm_eps", 0, REFUSED),
        ("query_pre_attn_scalar", 256, RIGHT), ("query_pre_attn_scalar", GONE, RIGHT),
        ("query_pre_attn_scalar", 0, REFUSED), ("sliding_window", 9, RIGHT), ("sliding_window", GONE, RIGHT),
        ("sliding_window", None, REFUSED), ("sliding_window", 0, REFUSED), ("sliding_window", "8", REFUSED),
        ("layer_types", None, RIGHT), ("layer_types", GONE, RIGHT), ("layer_types", ["full_attention"] * 4, RIGHT),
        ("layer_types", ["sliding_attention"] * 4, RIGHT), ("layer_types", ["sliding_attention"] * 3, REFUSED),
        ("layer_types", ["linear_attention"] * 4, REFUSED), ("attn_logit_softcapping", 50.0, REFUSED),
        ("final_logit_softcapping", 30.0, REFUSED), ("use_bidirectional_attention", True, REFUSED),
        ("use_bidirectional_attention", None, RIGHT), ("attention_bias", True, REFUSED), ("head_dim", GONE, REFUSED),
        ("head_dim", 15, REFUSED), ("num_key_value_heads", 1, REFUSED), ("num_attention_heads", 3, REFUSED),
        ("rope_parameters.full_attention", {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}, RIGHT),
        ("rope_parameters.full_attention", {"rope_type": "yarn", "factor": 3.0, "rope_theta": 1e4}, REFUSED),
        ("rope_parameters.full_attention", {"type": "yarn", "factor": 3.0, "rope_theta": 1e4}, REFUSED),
        ("rope_parameters.full_attention", {"rope_type": "default", "rope_theta": 0}, REFUSED),
        ("rope_parameters.full_attention", None, RIGHT), ("rope_parameters.sliding_attention", None, RIGHT),
        ("rope_parameters.sliding_attention", {"rope_type": "default", "rope_theta": 5e5}, RIGHT),
        ("rope_parameters.sliding_attention", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, REFUSED),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, REFUSED), ("rope_parameters", GONE, RIGHT),
        ("num_hidden_layers", 3, REFUSED), ("tie_word_embeddings", False, REFUSED),
        ("tie_word_embeddings", GONE, RIGHT),
        ("max_position_embeddings", 600, RIGHT), ("attention_dropout", 0.5, RIGHT),
    ]),
    "mistral": ("no window", [
        *GATED, ("sliding_window", 4096, RIGHT), ("sliding_window", 7, RIGHT), ("sliding_window", GONE, RIGHT),
 ("sliding_window", 0, REFUSED), ("sliding_window", "no", REFUSED),
        ("tie_word_embeddings", True, RIGHT), ("num_hidden_layers", 1, RIGHT), ("head_dim", None, RIGHT),
    ]),
    "phi3": ("long from 64 tokens on", [
        *(c for c in GATED if not c[0].startswith(("rope_", "num_attention", "max_position", "head", "hidden_size"))),
        ("rope_parameters.rope_theta", 5e4, RIGHT), ("rope_parameters.rope_theta", 0, REFUSED),
        ("rope_parameters.rope_type", "linear", REFUSED), ("rope_parameters.rope_type", "default", RIGHT),
        ("rope_parameters.rope_type", "su", RIGHT), ("rope_parameters.rope_type", "yarn", RIGHT),
        ("rope_parameters.short_factor", [1.0] * 7, REFUSED), ("rope_parameters.long_factor", GONE, REFUSED),
        ("rope_parameters.short_factor", [0.0] * 8, REFUSED), ("rope_parameters.short_factor", [3.0] * 8, RIGHT),
        ("rope_parameters.long_factor", ["a"] * 8, REFUSED), ("rope_parameters.factor", 4.0, RIGHT),
        ("rope_parameters.factor", 0.5, RIGHT), ("rope_parameters.factor", 0, REFUSED),
        ("rope_parameters.attention_factor", 1.7, RIGHT), ("rope_parameters.attention_factor", -1, REFUSED),
        ("rope_parameters.partial_rotary_factor", 0.0, REFUSED), ("rope_parameters.partial_rotary_factor", 2, REFUSED),
        ("rope_parameters.partial_rotary_factor", 1, RIGHT),
        ("rope_parameters.original_max_position_embeddings", 10, RIGHT),
        ("original_max_position_embeddings", 10, RIGHT), ("original_max_position_embeddings", GONE, RIGHT),
        ("original_max_position_embeddings", 0, REFUSED), ("max_position_embeddings", 64, RIGHT),
        ("max_position_embeddings", 256, RIGHT), ("sliding_window", 1024, RIGHT), ("sliding_window", 0, REFUSED),
        ("resid_pdrop", 0.5, RIGHT), ("embd_pdrop", 0.5, RIGHT), ("attention_bias", True, RIGHT),
        ("num_attention_heads", 0, REFUSED), ("num_attention_heads", 3, REFUSED), ("num_hidden_layers", 1, RIGHT),
        ("tie_word_embeddings", True, RIGHT),
    ]),
    "mixtral": ("plain", [
        *GATED,
        ("num_experts_per_tok", 1, RIGHT), ("num_experts_per_tok", 4, RIGHT), ("num_experts_per_tok", 0, REFUSED),
        ("num_experts_per_tok", 5, REFUSED), ("num_experts_per_tok", "2", REFUSED),
        ("num_experts_per_tok", GONE, RIGHT),
        ("num_local_experts", 5, REFUSED), ("num_local_experts", 0, REFUSED), ("num_local_experts", GONE, REFUSED),
        ("router_jitter_noise", 0.5, RIGHT),
        ("router_aux_loss_coef", 0.5, RIGHT), ("output_router_logits", True, RIGHT),
        ("sliding_window", 4096, RIGHT), ("sliding_window", 0, REFUSED), ("tie_word_embeddings", True, RIGHT),
        ("num_hidden_layers", 1, RIGHT), ("head_dim", None, RIGHT),
    ]),
    "qwen3_moe": ("plain", [
        *(case for case in GATED if case[0] != "intermediate_size"), ("intermediate_size", 100, RIGHT),
        ("num_experts_per_tok", 1, RIGHT), ("num_experts_per_tok", 8, RIGHT), ("num_experts_per_tok", 9, REFUSED),
        ("num_experts_per_tok", GONE, RIGHT), ("num_local_experts", 9, REFUSED), ("num_local_experts", "8", REFUSED),
        ("norm_topk_prob", False, RIGHT), ("norm_topk_prob", 1, REFUSED), ("norm_topk_prob", GONE, RIGHT),
        ("moe_intermediate_size", 52, REFUSED), ("moe_intermediate_size", 0, REFUSED),
        ("decoder_sparse_step", 2, REFUSED), ("decoder_sparse_step", 0, REFUSED), ("decoder_sparse_step", GONE, RIGHT),
        ("mlp_only_layers", [0], REFUSED), ("mlp_only_layers", [7], RIGHT), ("mlp_only_layers", "0", REFUSED),
        ("mlp_only_layers", None, RIGHT), ("attention_bias", True, REFUSED), ("use_sliding_window", True, REFUSED),
        ("sliding_window", 4, RIGHT), ("router_aux_loss_coef", 9.0, RIGHT), ("output_router_logits", True, RIGHT),
        ("tie_word_embeddings", GONE, RIGHT), ("num_hidden_layers", 1, RIGHT),
    ]),
    "qwen2_moe": ("plain", [
        *(case for case in GATED if case[0] != "intermediate_size"), ("intermediate_size", 100, RIGHT),
        ("shared_expert_intermediate_size", 52, REFUSED), ("shared_expert_intermediate_size", 0, REFUSED),
        ("shared_expert_intermediate_size", GONE, REFUSED), ("qkv_bias", False, RIGHT), ("qkv_bias", 1, REFUSED),
        ("norm_topk_prob", True, RIGHT), ("norm_topk_prob", GONE, RIGHT), ("num_experts_per_tok", 9, REFUSED),
        ("num_experts", 9, REFUSED), ("use_sliding_window", True, REFUSED), ("mlp_only_layers", [0], REFUSED),
        ("decoder_sparse_step", 2, REFUSED), ("tie_word_embeddings", True, RIGHT),
    ]),
    "gpt_oss": ("windows of 20 in every second layer", [
        *SIZES, ("hidden_act", "gelu", REFUSED), ("swiglu_limit", 5.0, REFUSED), ("swiglu_limit", GONE, RIGHT),
        ("swiglu_alpha", 1.0, REFUSED), ("swiglu_alpha", GONE, RIGHT),
        ("sliding_window", 21, RIGHT), ("sliding_window", GONE, RIGHT), ("sliding_window", 0, REFUSED),
        ("layer_types", None, RIGHT), ("layer_types", ["full_attention"] * 3, RIGHT),
        ("layer_types", ["linear_attention"] * 3, REFUSED), ("attention_bias", False, RIGHT),
        ("attention_bias", GONE, RIGHT), ("num_experts_per_tok", 1, RIGHT), ("num_experts_per_tok", GONE, RIGHT),
        ("num_experts_per_tok", 5, REFUSED), ("num_local_experts", 5, REFUSED), ("head_dim", 15, REFUSED),
        ("head_dim", GONE, REFUSED), ("rope_parameters", GONE, RIGHT), ("rope_parameters", YARN, RIGHT),
        ("rope_parameters.truncate", True, RIGHT), ("rope_parameters.rope_type", "longrope", REFUSED),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, RIGHT), ("rms_norm_eps", 1e-3, RIGHT),
        ("rms_norm_eps", GONE, RIGHT), ("num_key_value_heads", 1, REFUSED), ("tie_word_embeddings", True, RIGHT),
        ("router_aux_loss_coef", 9.0, RIGHT), ("num_hidden_layers", 2, REFUSED),
    ]),
    "ministral3": ("grows from 20", [
        *(c for c in GATED if not c[0].startswith("rope_")), ("rope_parameters.llama_4_scaling_beta", 0.5, RIGHT),
        ("rope_parameters.llama_4_scaling_beta", 0, RIGHT), ("rope_parameters.llama_4_scaling_beta", GONE, REFUSED),
        ("rope_parameters.llama_4_scaling_beta", -1, REFUSED), ("rope_parameters.mscale", 0.5, RIGHT),
        ("rope_parameters.original_max_position_embeddings", 33, RIGHT), ("sliding_window", 7, RIGHT),
        ("rope_parameters.original_max_position_embeddings", 0, REFUSED), ("rope_parameters", GONE, RIGHT),
        ("rope_parameters.rope_type", "longrope", REFUSED), ("tie_word_embeddings", True, RIGHT),
    ]),
    "glm4": ("half of a head", [
        *(c for c in GATED if not c[0].startswith(("rope_", "head_dim"))), ("rope_parameters.rope_theta", 5e4, RIGHT),
        ("rope_parameters.partial_rotary_factor", 0.25, RIGHT), ("rope_parameters.partial_rotary_factor", 1.0, RIGHT),
        ("rope_parameters.partial_rotary_factor", 0.0, REFUSED), ("rope_parameters.rope_type", "linear", REFUSED),
        ("rope_parameters", GONE, RIGHT), ("attention_bias", False, RIGHT), ("attention_bias", GONE, RIGHT),
        ("rms_norm_eps", GONE, RIGHT), ("tie_word_embeddings", True, RIGHT), ("num_hidden_layers", 1, RIGHT),
    ]),
    "smollm3": ("every second layer without positions", [
        *(c for c in GATED if not c[0].startswith("head_dim")), *YARNS, ("no_rope_layers", [1, 1, 1, 1], RIGHT),
        ("no_rope_layers", [0, 0, 0, 0], RIGHT), ("no_rope_layers", [1], REFUSED), ("no_rope_layers", None, RIGHT),
        ("no_rope_layers", [2, 1, 1, 1], REFUSED), ("no_rope_layer_interval", 3, RIGHT),
        ("no_rope_layer_interval", 0, REFUSED), ("use_sliding_window", True, RIGHT), ("attention_bias", True, REFUSED),
        ("mlp_bias", True, REFUSED), ("tie_word_embeddings", GONE, RIGHT), ("layer_types", None, RIGHT),
    ]),
    "olmo2": ("plain", [
        *GATED, *YARNS, ("attention_bias", True, REFUSED), ("tie_word_embeddings", True, RIGHT),
        ("rms_norm_eps", GONE, RIGHT), ("use_sliding_window", True, REFUSED),
    ]),
    "olmo3": ("yarn in the fourth layer", [
        ("sliding_window", 24, RIGHT), ("sliding_window", None, REFUSED), ("sliding_window", GONE, RIGHT),
        ("layer_types", None, RIGHT), ("layer_types", ["full_attention"] * 4, RIGHT), ("layer_types", [], REFUSED),
        ("rope_parameters.full_attention.factor", 2.0, RIGHT), ("rope_parameters", GONE, RIGHT),
        ("rope_parameters.full_attention.rope_theta", 5e4, RIGHT), ("rms_norm_eps", GONE, RIGHT),
        ("rope_parameters.sliding_attention.rope_theta", 5e4, RIGHT),
        ("rope_parameters.sliding_attention.rope_type", "linear", REFUSED), ("attention_bias", True, REFUSED),
        ("tie_word_embeddings", True, RIGHT),
    ]),
    "seed_oss": ("plain", [
        *GATED, *YARNS, ("attention_bias", False, RIGHT), ("attention_bias", GONE, RIGHT), ("mlp_bias", True, REFUSED),
        ("attention_out_bias", True, REFUSED), ("residual_dropout", 0.9, RIGHT), ("tie_word_embeddings", True, RIGHT),
    ]),
    "granite": ("plain", [
        *(c for c in GATED if not c[0].startswith("head_dim")), *YARNS, ("attention_multiplier", 0.5, RIGHT),
        ("attention_multiplier", GONE, RIGHT), ("attention_multiplier", 0, REFUSED), ("logits_scaling", 2, RIGHT),
        ("logits_scaling", "8", REFUSED), ("embedding_multiplier", GONE, RIGHT), ("residual_multiplier", -1, REFUSED),
        ("attention_bias", True, REFUSED), ("mlp_bias", True, REFUSED), ("tie_word_embeddings", True, RIGHT),
    ]),
    "opt": ("125m", [
        *SIZES, ("do_layer_norm_before", "yes", REFUSED), ("do_layer_norm_before", False, RIGHT),
        ("_remove_final_layer_norm", True, RIGHT), ("layer_norm_elementwise_affine", False, REFUSED),
        ("enable_bias", False, RIGHT), ("enable_bias", 1, REFUSED), ("activation_function", "gelu", RIGHT),
        ("activation_function", "gelu_new", RIGHT), ("activation_function", "tanh", REFUSED),
        ("activation_function", GONE, RIGHT), ("word_embed_proj_dim", 32, REFUSED),
        ("word_embed_proj_dim", None, RIGHT),
        ("word_embed_proj_dim", 0, REFUSED), ("num_attention_heads", 8, RIGHT), ("num_attention_heads", 3, REFUSED),
        ("num_attention_heads", 64, REFUSED), ("max_position_embeddings", 100, REFUSED), ("ffn_dim", 100, REFUSED),
        ("hidden_size", 32, REFUSED), ("num_hidden_layers", 1, RIGHT), ("num_hidden_layers", 3, REFUSED),
        ("tie_word_embeddings", GONE, RIGHT), ("dropout", 0.9, RIGHT), ("layerdrop", 0.5, RIGHT),
        ("init_std", 9.0, RIGHT),
    ]),
    "nemotron_h": ("a part a layer, two groups", [
        *SIZES, ("mlp_hidden_act", "gelu", RIGHT), ("mlp_hidden_act", "relu", RIGHT), ("mlp_hidden_act", "silu", RIGHT),
        ("mlp_hidden_act", "tanh", REFUSED), ("mlp_hidden_act", GONE, RIGHT), ("layers_block_type", GONE, REFUSED),
        ("layers_block_type", ["mamba", "mlp", "attention", "mlp", "mamba"], RIGHT), ("expand", 7, RIGHT),
        ("layers_block_type", ["linear_attention"] * 5, REFUSED), ("layer_norm_epsilon", 1e-3, RIGHT),
        ("layer_norm_epsilon", 0, REFUSED), ("attention_bias", True, REFUSED), ("use_bias", True, REFUSED),
        ("mlp_bias", True, REFUSED), ("n_groups", 1, REFUSED), ("n_groups", 3, REFUSED), ("conv_kernel", 3, REFUSED),
        ("ssm_state_size", 16, REFUSED), ("mamba_head_dim", 8, REFUSED), ("use_conv_bias", False, RIGHT),
        ("chunk_size", 16, RIGHT), ("time_step_max", 5.0, RIGHT), ("mamba_proj_bias", True, RIGHT),
        ("residual_in_fp32", True, REFUSED), ("sliding_window", 8, REFUSED), ("num_hidden_layers", 3, RIGHT),
        ("head_dim", 8, REFUSED), ("mamba_n_groups", 1, REFUSED), ("rope_theta", 5.0, RIGHT),
    ]),
    "gpt2": ("tied", [
        *SIZES, ("activation_function", "gelu", RIGHT), ("activation_function", "relu", RIGHT),
        ("activation_function", "quick_gelu", RIGHT), ("activation_function", "mish", REFUSED),
        ("activation_function", GONE, RIGHT), ("n_head", 8, RIGHT), ("n_head", 3, REFUSED), ("n_head", 0, REFUSED),
        ("n_embd", 32, REFUSED), ("n_inner", 100, REFUSED), ("n_inner", 256, RIGHT), ("n_layer", 1, RIGHT),
        ("n_layer", 3, REFUSED), ("n_positions", 100, REFUSED), ("layer_norm_epsilon", 1e-2, RIGHT),
        ("layer_norm_epsilon", 0, REFUSED), ("layer_norm_epsilon", "small", REFUSED),
        ("scale_attn_weights", False, RIGHT), ("scale_attn_weights", "no", REFUSED),
        ("scale_attn_by_inverse_layer_idx", True, REFUSED), ("reorder_and_upcast_attn", True, RIGHT),
        ("add_cross_attention", True, REFUSED), ("n_ctx", 7, RIGHT), ("attn_pdrop", 0.9, RIGHT),
        ("resid_pdrop", 0.9, RIGHT), ("summary_type", "mean", RIGHT), ("tie_word_embeddings", GONE, RIGHT),
    ]),
}  # fmt: skip


def wrong(source: Path, tmp_path: Path, picked: Cases) -> list[str]:
    """A line for each case that ends otherwise than it should."""
    lines = []
    for i, (key, value, expected) in enumerate(picked):
        case = Case(altered(source, tmp_path / str(i), "config.json", key, value), source)
        found = verdict(case.ours, case.reference, key)
        if found != expected:
            lines.append(f"{key} = {'(none)' if value is GONE else value!r}: {found}, expected: {expected}")
    return lines


@pytest.mark.parametrize("family", CASES)
def test_a_sample_of_altered_keys(form: Any, tmp_path: Path, family: str) -> None:
    name, cases = CASES[family]
    assert not wrong(form(family.partition(" ")[0], name), tmp_path, random.Random(f"{family} 3").sample(cases, 3))


@pytest.mark.long
@pytest.mark.parametrize("family", CASES)
def test_every_altered_key(form: Any, tmp_path: Path, family: str) -> None:
    name, cases = CASES[family]
    assert len(cases) >= (14 if " " in family else 30)
    problems = wrong(form(family.partition(" ")[0], name), tmp_path, cases)
    print(f"\n{family}: {len(cases)} altered keys, {len(problems)} wrong")
    assert not problems, "\n".join(problems)
