"""Qwen2 with experts (Qwen1.5-MoE, Qwen2-57B-A14B): a gated shared expert beside those that the router chooses."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import WIDEST, experts_of, full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES
from trencadis.core.families.qwen3_moe import dense_layers


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen2MoeConfig."""
    full_attention(c)
    text = gated_decoder(c, heads_of(c), tied, positions=32768, qkv_bias=c.boolean("qkv_bias", True))
    experts = experts_of(
        c,
        "num_experts",
        4,
        inner=c.integer("moe_intermediate_size", most=WIDEST, default=1408),
        normalise=c.boolean("norm_topk_prob", False),
        dense=dense_layers(c, text.layers),
    )
    shared = c.integer("shared_expert_intermediate_size", most=WIDEST, default=5632)
    experts = replace(experts, shared=shared, shared_gate=True)
    return ParsedConfig(replace(text, experts=experts if len(experts.dense) < text.layers else None))


FAMILY = Family(
    name="Qwen2 with experts",
    model_type="qwen2_moe",
    architectures={
        "Qwen2MoeForCausalLM": GENERATE, "Qwen2MoeForSequenceClassification": CLASSIFY, "Qwen2MoeModel": BARE,
    },
    adapters=("attention",),
    config=describe,
    names=StoredNames(PREFIXES),
    ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)  # fmt: skip
