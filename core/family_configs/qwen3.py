"""Qwen3, dense and with experts: per-head norms of q and k, an explicit head size, and no biases by default.

Experts are in all or some layers and have an explicit intermediate size.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    MOST_LAYERS,
    WIDEST,
    experts_of,
    full_attention,
    gated_decoder,
    heads_of,
    some_windows,
)
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs.llama import PREFIXES


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3Config."""
    parts = {"qk_norm": True, **some_windows(c)._asdict()}
    bias = c.boolean("attention_bias", False)
    heads = heads_of(c, default=128)
    return ParsedConfig(gated_decoder(c, heads, tied, positions=32768, qkv_bias=bias, out_bias=bias, **parts))


FAMILY = Family(
    name="Qwen3",
    model_type="qwen3",
    architectures={"Qwen3ForCausalLM": GENERATE, "Qwen3ForSequenceClassification": CLASSIFY, "Qwen3Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
)


def describe_qwen3_moe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3MoeConfig."""
    full_attention(c)
    bias = c.boolean("attention_bias", False)
    text = gated_decoder(c, heads_of(c), tied, positions=32768, qkv_bias=bias, out_bias=bias, qk_norm=True)
    # The hub's key for the number of experts, and the one that transformers 5 writes.
    hub, saved = c.is_given("num_experts"), c.is_given("num_local_experts")
    experts = experts_of(
        c,
        "num_local_experts" if saved or not hub else "num_experts",
        8,
        inner=c.integer("moe_intermediate_size", most=WIDEST, default=768),
        normalise=c.boolean("norm_topk_prob", False),
        dense=dense_layers(c, text.layers),
    )
    return ParsedConfig(replace(text, experts=experts if len(experts.dense) < text.layers else None))


def dense_layers(c: JsonFields, layers: int) -> tuple[int, ...]:
    """Returns the layers without experts: those listed, and all but every ``decoder_sparse_step``-th."""
    step = c.integer("decoder_sparse_step", most=MOST_LAYERS, default=1)
    named = c.integers("mlp_only_layers", most=MOST_LAYERS) if c.is_given("mlp_only_layers") else ()
    return tuple(i for i in range(layers) if i in named or (i + 1) % step)


QWEN3_MOE = Family(
    name="Qwen3 with experts",
    model_type="qwen3_moe",
    architectures={
        "Qwen3MoeForCausalLM": GENERATE, "Qwen3MoeForSequenceClassification": CLASSIFY, "Qwen3MoeModel": BARE,
    },
    config=describe_qwen3_moe,
    adapters=("attention",),
    names=StoredNames(PREFIXES),
    ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)  # fmt: skip
