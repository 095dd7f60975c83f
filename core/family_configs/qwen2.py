"""Qwen2 and Qwen2.5: biases on q, k and v only. Reward models have a head of two linear layers for every token.

Qwen1.5-MoE and Qwen2-57B-A14B have a gated shared expert beside those that the router chooses.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    WIDEST,
    experts_of,
    full_attention,
    gated_decoder,
    heads_of,
    some_windows,
)
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, ClassHead, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.pooling_description import ALL, IDENTITY, SOFTMAX
from trencadis.core.family_configs.llama import PREFIXES
from trencadis.core.family_configs.qwen3 import dense_layers

REWARD = ClassHead(ALL, "relu", biased=True, classes=1, activation=IDENTITY)
STEPS = ClassHead(ALL, "relu", biased=True, classes=2, activation=SOFTMAX, step_tag=151651)
"""The head of process reward models, which score the token <extra_0> at the end of each solution step."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen2Config."""
    windows = some_windows(c)._asdict()
    return ParsedConfig(gated_decoder(c, heads_of(c), tied, positions=32768, qkv_bias=True, **windows))


FAMILY = Family(
    name="Qwen2 and Qwen2.5",
    model_type="qwen2",
    architectures={
        "Qwen2ForCausalLM": GENERATE,
        "Qwen2ForSequenceClassification": CLASSIFY,
        "Qwen2ForRewardModel": CLASSIFY,
        "Qwen2ForProcessRewardModel": CLASSIFY,
        "Qwen2Model": BARE,
    },
    config=describe,
    names=StoredNames({"score.0.": "score_dense.", "score.2.": "score."} | PREFIXES),
    heads={"Qwen2ForRewardModel": REWARD, "Qwen2ForProcessRewardModel": STEPS},
    defaults={"fp32_softmax": True, "block_adjustment": False},
)


def describe_qwen2_moe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
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


QWEN2_MOE = Family(
    name="Qwen2 with experts",
    model_type="qwen2_moe",
    architectures={
        "Qwen2MoeForCausalLM": GENERATE, "Qwen2MoeForSequenceClassification": CLASSIFY, "Qwen2MoeModel": BARE,
    },
    adapters=("attention",),
    config=describe_qwen2_moe,
    names=StoredNames(PREFIXES),
    ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)  # fmt: skip
