"""gpt-oss: experts in every layer, attention sinks, and a sliding window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    experts_of,
    gated_decoder,
    heads_of,
    layer_types,
    windows_of,
)
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs.llama import PREFIXES
from trencadis.core.json_types import JsonMapping

ROPE: JsonMapping = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""transformers' default of ``rope_parameters``."""

THETA = 150000.0


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' GptOssConfig."""
    if not c.is_given("rope_scaling") and not c.is_given("rope_parameters"):
        c = c.with_values(rope_parameters=ROPE)
    c.only("hidden_act", ("silu",), "silu")
    c.only("swiglu_alpha", (1.702,), 1.702)
    c.only("swiglu_limit", (7.0,), 7.0)
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS)
    types = layer_types(c) or [FULL if i % 2 else SLIDING for i in range(layers)]
    window = c.integer("sliding_window", default=128) if c.values.get("sliding_window", 128) is not None else 0
    bias = c.boolean("attention_bias", True)
    text = gated_decoder(
        c.with_defaults({"rms_norm_eps": 1e-5}), heads_of(c, default=64), tied, positions=131072, theta=THETA,
        qkv_bias=bias, out_bias=bias, **windows_of(c, window, types)._asdict(),
    )  # fmt: skip
    experts = experts_of(c, "num_local_experts", 4, inner=text.intermediate, normalise=True)
    return ParsedConfig(replace(text, experts=replace(experts, bias=True), activation="clamped_swiglu", sinks=True))


FAMILY = Family(
    name="gpt-oss",
    model_type="gpt_oss",
    architectures={"GptOssForCausalLM": GENERATE, "GptOssForSequenceClassification": CLASSIFY, "GptOssModel": BARE},
    adapters=("attention",),
    config=describe,
    names=StoredNames(PREFIXES, ((".mlp.router.", ".mlp.gate."),), alternating=True),
    ignored=frozenset({"initial_context_length", "experts_per_token", "output_router_logits", "router_aux_loss_coef"}),
)
