"""Small random checkpoints of the text families, three of each: head counts, tied heads, biases, stored names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.checkpoints import IDS, VOCAB, randomise, text_settings, write_tokenizer

EOS = IDS["<|im_end|>"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
GPT2: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=EOS, eos_token_id=EOS
)
OPT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
    max_position_embeddings=512, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=1,
)  # fmt: skip
GEMMA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=20, sliding_window=8, max_position_embeddings=512,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"], rms_norm_eps=1e-6,
    bos_token_id=EOS, eos_token_id=EOS, pad_token_id=1,
)  # fmt: skip
GEMMA4: dict[str, Any] = {k: v for k, v in GEMMA.items() if k != "query_pre_attn_scalar"} | dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"], global_head_dim=32,
    num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=4.0, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=VOCAB,
)  # fmt: skip
GEMMA4_MOE: dict[str, Any] = GEMMA4 | dict(
    enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=40,
)  # fmt: skip
GEMMA4_SMALL: dict[str, Any] = GEMMA4 | dict(
    hidden_size_per_layer_input=12, num_kv_shared_layers=4, use_double_wide_mlp=True, num_hidden_layers=8,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    attention_k_eq_v=False, num_key_value_heads=1,
)  # fmt: skip
GEMMA4_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e4, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
MIXTRAL: dict[str, Any] = text_settings(num_local_experts=4, num_experts_per_tok=2, sliding_window=None, head_dim=16)
QWEN2_MOE: dict[str, Any] = text_settings(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=80,
)
GLM4: dict[str, Any] = text_settings(head_dim=16, pad_token_id=1)
SMOLLM3: dict[str, Any] = text_settings(num_hidden_layers=4, no_rope_layer_interval=2, pad_token_id=1)
OLMO3: dict[str, Any] = text_settings(num_hidden_layers=4, sliding_window=16, pad_token_id=1)
MINISTRAL3: dict[str, Any] = text_settings(head_dim=16, pad_token_id=1) | dict(
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 20,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    },
)
GRANITE: dict[str, Any] = text_settings(
    attention_multiplier=0.3,
    embedding_multiplier=5.0,
    residual_multiplier=0.4,
    logits_scaling=3.0,
)
GPT_OSS: dict[str, Any] = text_settings(
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=20,
    pad_token_id=1,
    num_hidden_layers=3,
)
QWEN3_MOE: dict[str, Any] = text_settings(
    head_dim=16, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
)
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.8, 2.0, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 12.0],
}  # fmt: skip
PHI3: dict[str, Any] = text_settings(sliding_window=None, max_position_embeddings=512)
QWEN3_5: dict[str, Any] = text_settings(
    num_hidden_layers=4, head_dim=32, max_position_embeddings=512, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, layer_types=None,
    rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
)  # fmt: skip
QWEN3_5_MOE: dict[str, Any] = QWEN3_5 | dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=40,
)  # fmt: skip
QWEN3_5_MOE.pop("intermediate_size")
QWEN3_NEXT: dict[str, Any] = QWEN3_5_MOE | dict(
    intermediate_size=96, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
)  # fmt: skip
LFM2: dict[str, Any] = text_settings(
    num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"], intermediate_size=120,
    block_multiple_of=16, pad_token_id=1,
)  # fmt: skip
LFM2["norm_eps"] = LFM2.pop("rms_norm_eps")
GRANITE_HYBRID: dict[str, Any] = GRANITE | dict(
    num_hidden_layers=4, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96, position_embedding_type="nope",
    mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=32, mamba_expand=2, mamba_d_head="auto", mamba_d_conv=4,
    mamba_chunk_size=64, pad_token_id=1,
)  # fmt: skip
NEMOTRON_H: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=32,
    layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    bos_token_id=EOS, eos_token_id=EOS, pad_token_id=1,
)  # fmt: skip
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "windows of 8, four layers": GEMMA,
        "one KV head, linear, untied": GEMMA | dict(
            num_key_value_heads=1, tie_word_embeddings=False, head_dim=32, query_pre_attn_scalar=24, sliding_window=33,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        ),
        "biases, every layer a window of all": GEMMA | dict(
            attention_bias=True, sliding_window=512, num_key_value_heads=4, layer_types=["sliding_attention"] * 4,
        ),
    },
    "gemma4": {
        "keys as values, heads of 16 and 32": GEMMA4,
        "experts beside, biases, values of their own, untied": GEMMA4_MOE | dict(
            attention_bias=True, attention_k_eq_v=False, tie_word_embeddings=False, rope_parameters=GEMMA4_ROPE,
            final_logit_softcapping=None, sliding_window=33,
        ),
        "embeddings for each layer, keys of earlier layers": GEMMA4_SMALL,
        "experts, narrow full heads first, four of them": GEMMA4_MOE | dict(
            global_head_dim=8, num_global_key_value_heads=4, num_experts=5, top_k_experts=3,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
    },
    "gemma4_unified": {
        "keys as values, one KV head of 24": {
            k: v for k, v in GEMMA4.items() if "per_layer" not in k
        } | dict(global_head_dim=24, num_hidden_layers=3, layer_types=GEMMA4["layer_types"][1:]),
        "every layer alike, values of their own": {
            k: v for k, v in GEMMA4.items() if "per_layer" not in k
        } | dict(layer_types=["full_attention"] * 2, num_hidden_layers=2, attention_k_eq_v=False),
    },
    "qwen3": {
        "plain": text_settings(head_dim=16),
        "tied, one KV head, wide heads": text_settings(head_dim=32, num_key_value_heads=1, tie_word_embeddings=True),
        "biases, yarn": text_settings(head_dim=16, attention_bias=True, num_key_value_heads=4, rope_parameters=YARN),
        "window in the second layer": text_settings(
            head_dim=16, use_sliding_window=True, sliding_window=16, max_window_layers=1
        ),
    },
    "mistral": {
        "no window": text_settings(sliding_window=None),
        "window of 20": text_settings(sliding_window=20, num_key_value_heads=4),
        "window of the longest request, wide heads": text_settings(sliding_window=512, head_dim=32),
        "tied, linear": text_settings(
            sliding_window=None, tie_word_embeddings=True, num_key_value_heads=1,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
    },
    "phi3": {
        "long from 100, three quarters of a head turn, tied": PHI3 | dict(
            rope_parameters=LONGROPE | dict(
                short_factor=[1.0, 1.1, 1.2, 1.4, 1.8, 2.0], long_factor=[1.5, 2.0, 4.0, 8.0, 9.0, 12.0],
                partial_rotary_factor=0.75, attention_factor=1.25, original_max_position_embeddings=100,
            ),
            original_max_position_embeddings=100, tie_word_embeddings=True, num_key_value_heads=1,
        ),
        "long from 64 tokens on": PHI3 | dict(
            rope_parameters=LONGROPE, original_max_position_embeddings=64, num_key_value_heads=4,
        ),
        "half of a head turns": PHI3 | dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    },
    "mixtral": {
        "plain": MIXTRAL,
        "names of transformers 5, wide heads": MIXTRAL | dict(head_dim=32, num_local_experts=5, intermediate_size=52),
        "tied, three of eight": MIXTRAL
        | dict(
            tie_word_embeddings=True, num_local_experts=8, num_experts_per_tok=3, num_key_value_heads=1, head_dim=None
        ),
    },
    "qwen3_moe": {
        "plain": QWEN3_MOE,
        "shares as they are, every second layer": QWEN3_MOE
        | dict(norm_topk_prob=False, decoder_sparse_step=2, num_hidden_layers=3, tie_word_embeddings=True),
        "names of transformers 5, biases, one of its layers dense": QWEN3_MOE
        | dict(mlp_only_layers=[0], attention_bias=True, num_key_value_heads=4, moe_intermediate_size=52),
    },
    "qwen3_5": {
        "one layer of four attends": QWEN3_5,
        "tied, first and last attend, a head each": QWEN3_5 | dict(
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
            tie_word_embeddings=True, linear_num_value_heads=2, linear_value_head_dim=24, linear_conv_kernel_dim=3,
            num_key_value_heads=1, head_dim=16,
            rope_parameters=QWEN3_5["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]},
        ),
    },
    "qwen3_5_moe": {
        "experts beside a shared one": QWEN3_5_MOE,
        "tied, one KV head": QWEN3_5_MOE | dict(
            tie_word_embeddings=True, num_key_value_heads=1, shared_expert_intermediate_size=52,
            layer_types=["linear_attention", "full_attention", "full_attention", "linear_attention"],
        ),
    },
    "qwen3_next": {
        "interleaved projections": QWEN3_NEXT,
        "dense layers, three value heads a key head": QWEN3_NEXT | dict(
            mlp_only_layers=[1, 3], linear_num_value_heads=6, norm_topk_prob=False,
        ),
    },
    "qwen2_moe": {
        "plain": QWEN2_MOE,
        "every second layer, divided by their sum, tied": QWEN2_MOE
        | dict(norm_topk_prob=True, decoder_sparse_step=2, num_hidden_layers=3, tie_word_embeddings=True),
        "one KV head, no biases": QWEN2_MOE
        | dict(num_key_value_heads=1, qkv_bias=False, shared_expert_intermediate_size=52),
    },
    "glm4": {
        "half of a head": GLM4,
        "a quarter, tied, one KV head": GLM4 | dict(
            rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
            tie_word_embeddings=True, num_key_value_heads=1,
        ),
        "whole heads, no biases": GLM4 | dict(
            rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
            attention_bias=False,
        ),
    },
    "smollm3": {
        "every second layer without positions": SMOLLM3,
        "yarn, biases, untied": SMOLLM3 | dict(
            rope_parameters=YARN, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
            no_rope_layers=[0, 1, 1, 0],
        ),
        "windows": SMOLLM3 | dict(use_sliding_window=True, sliding_window=16, num_key_value_heads=1),
    },
    "seed_oss": {
        "plain": text_settings(head_dim=16, pad_token_id=1),
        "all biases, one KV head, wide heads": text_settings(
            head_dim=32, pad_token_id=1, attention_out_bias=True, mlp_bias=True, num_key_value_heads=1,
        ),
        "no biases, tied": text_settings(
            head_dim=16, pad_token_id=1, attention_bias=False, tie_word_embeddings=True, num_key_value_heads=4,
        ),
    },
    "olmo2": {
        "plain": text_settings(pad_token_id=1),
        "biases, yarn, tied, one KV head": text_settings(
            pad_token_id=1, attention_bias=True, rope_parameters=YARN, tie_word_embeddings=True, num_key_value_heads=1,
        ),
        "bases of the file, as many KV heads as heads": text_settings(
            pad_token_id=1, num_key_value_heads=4, rope_parameters=dict(rope_type="default", rope_theta=5e5),
        ),
    },
    "olmo3": {
        "yarn in the fourth layer": OLMO3 | dict(rope_parameters={
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
        }),
        "one table, biases, tied": OLMO3 | dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
        "two bases, listed types": OLMO3 | dict(
            num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        ),
    },
    "ministral3": {
        "grows from 20": MINISTRAL3,
        "window of 24, tied, one KV head": MINISTRAL3 | dict(
            sliding_window=24, tie_word_embeddings=True, num_key_value_heads=1,
        ),
        "grows fast, wide heads": MINISTRAL3 | dict(
            head_dim=32, rope_parameters=MINISTRAL3["rope_parameters"] | dict(llama_4_scaling_beta=2.0, mscale=0.5),
        ),
    },
    "granite": {
        "plain": GRANITE,
        "biases, tied, one KV head": GRANITE | dict(
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=1,
        ),
        "yarn": GRANITE | dict(rope_parameters=YARN, num_key_value_heads=4),
    },
    "granite_hybrid": {
        "a shared MLP alone, no positions": GRANITE_HYBRID,
        "experts, two groups, rotary, biases": GRANITE_HYBRID | dict(
            num_local_experts=6, num_experts_per_tok=2, intermediate_size=40, position_embedding_type="rope",
            mamba_n_groups=2, mamba_d_state=16, mamba_proj_bias=True, attention_bias=True, num_key_value_heads=1,
        ),
        "attention alone, tied": GRANITE_HYBRID | dict(
            layer_types=["full_attention"] * 4, position_embedding_type="rope", tie_word_embeddings=True,
        ),
    },
    "lfm2": {
        "convolutions of 3": LFM2,
        "of 4, tied, one KV head, sizes as they are": LFM2 | dict(
            conv_L_cache=4, num_key_value_heads=1, block_auto_adjust_ff_dim=False, tie_word_embeddings=True,
            layer_types=["conv", "full_attention", "full_attention", "conv"],
        ),
        "layers by number": LFM2 | dict(layer_types=None, full_attn_idxs=[1, 3], block_ffn_dim_multiplier=1.3),
    },
    "nemotron_h": {
        "experts, two of four groups, a shared one": NEMOTRON_H | dict(
            layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"], n_routed_experts=8,
            num_experts_per_tok=3, moe_intermediate_size=48, moe_shared_expert_intermediate_size=80, n_group=4,
            topk_group=2, routed_scaling_factor=2.5,
        ),
        "experts of 32 values, weights as they are": NEMOTRON_H | dict(
            layers_block_type=["moe", "linear_attention", "full_attention"], n_routed_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=52, moe_shared_expert_intermediate_size=44,
            moe_latent_size=32, norm_topk_prob=False, mlp_hidden_act="silu",
        ),
        "a part a layer, two groups": NEMOTRON_H,
        "one KV head, biases, an MLP first": NEMOTRON_H | dict(
            layers_block_type=["mlp", "full_attention", "linear_attention", "linear_attention", "full_attention"],
            mlp_bias=True, use_bias=True, num_key_value_heads=1, conv_kernel=3, n_groups=1, tie_word_embeddings=True,
        ),
        "no MLP, wide heads of attention": NEMOTRON_H | dict(
            layers_block_type=["linear_attention", "full_attention"], head_dim=32, use_conv_bias=False,
        ),
    },
    "gpt_oss": {
        "windows of 20 in every second layer": GPT_OSS,
        "three of eight, one KV head, wide heads, tied": GPT_OSS | dict(
            num_local_experts=8, num_experts_per_tok=3, num_key_value_heads=1, head_dim=32, intermediate_size=52,
            tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "no biases in attention": GPT_OSS | dict(attention_bias=False, hidden_size=96, sliding_window=8),
    },
    "opt": {
        "125m": OPT,
        "350m": OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=32),
        "without biases": OPT | dict(enable_bias=False, activation_function="gelu", tie_word_embeddings=False),
    },
    "gpt2": {
        "tied": GPT2,
        "bare names, own inner size": GPT2 | dict(n_inner=80, activation_function="gelu", n_head=2),
        "untied, unscaled": GPT2 | dict(tie_word_embeddings=False, scale_attn_weights=False, layer_norm_epsilon=1e-3),
    },
}  # fmt: skip
CLASSES = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}
CASES = [(family, form) for family, forms in FORMS.items() for form in forms]


def family_checkpoint(folder: Path, *, family: str, form: str, **changes: Any) -> Path:
    """A checkpoint of one form; ``changes`` are further settings."""
    import transformers

    config, model = (getattr(transformers, name) for name in CLASSES[family])
    made = model(config(**{**FORMS[family][form], **changes}))
    randomise(made, 0)
    _louder(made)
    made.generation_config = transformers.GenerationConfig(eos_token_id=EOS, do_sample=False)
    made.to(torch.float32).eval().save_pretrained(folder)
    write_tokenizer(folder)
    if "bare names" in form:
        rename(folder, {"transformer.": ""})
    if "transformers 5" in form:
        stack(folder)
    return folder


def _louder(model: Any) -> None:
    """Fused and stacked projections are random as those of the others are; positions count as much as words."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "wpe" in name or "embed_positions" in name:
                p.mul_(2)
            if name.endswith("A_log"):  # states that last for tens of tokens
                p.sub_(3)
            if name.endswith(("conv1d.weight", "conv.conv.weight")):
                p.mul_(5)
        generator = torch.Generator().manual_seed(7)
        for name, b in model.named_buffers():
            if name.endswith("layer_scalar"):
                b.copy_(0.7 + torch.rand(b.shape, generator=generator))
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.3 * torch.randn(b.shape, generator=generator))


def rename(folder: Path, prefixes: dict[str, str], ends: tuple[tuple[str, str], ...] = ()) -> None:
    """Stores the weights under other names, as older conversions have them."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for reference, ours in prefixes.items():
        held = {ours + n.removeprefix(reference) if n.startswith(reference) else n: t for n, t in held.items()}
    for reference, ours in ends:
        held = {n.removesuffix(reference) + ours if n.endswith(reference) else n: t for n, t in held.items()}
    save_file({n: t.contiguous() for n, t in held.items()}, file, metadata={"format": "pt"})


def stack(folder: Path) -> None:
    """Stores each layer's experts as two tensors, as transformers 5 holds them; it saves them one by one."""
    file = folder / "model.safetensors"
    held = load_file(file)
    ours = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    for reference, name in ours.items():
        held = {n.replace(reference, name): t for n, t in held.items()}
    for at in sorted({n.partition(".experts.")[0] for n in held if ".experts." in n}):
        count = sum(n.startswith(f"{at}.experts.") for n in held) // 3
        each = [[held.pop(f"{at}.experts.{i}.{part}_proj.weight") for part in ("gate", "up", "down")]
                for i in range(count)]  # fmt: skip
        held[f"{at}.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        held[f"{at}.experts.down_proj"] = torch.stack([down for _, _, down in each])
    save_file(held, file, metadata={"format": "pt"})


def set_keys(folder: Path, **values: Any) -> None:
    """Changes keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
