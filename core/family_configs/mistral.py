"""Mistral 7B 0.1 to 0.3, Nemo and models of the same architecture: Llama without biases, some with a sliding window.

Ministral-3 has YaRN, and queries that grow with the logarithm of the position. Mixtral has experts in every layer; the
published models use two of eight per token.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import experts_of, full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.decoder_layer_config import QueryGrowth
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs.llama import PREFIXES
from trencadis.core.json_types import JsonMapping

WINDOW = 4096
"""transformers' default if the key is missing; a null means no window."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' MistralConfig."""
    full_attention(c)
    text = gated_decoder(c, heads_of(c), tied, positions=4096 * 32, qkv_bias=False)
    none = "sliding_window" in c.values and not c.is_given("sliding_window")
    return ParsedConfig(replace(text, window=0 if none else c.integer("sliding_window", default=WINDOW)))


FAMILY = Family(
    name="Mistral",
    model_type="mistral",
    architectures={"MistralForCausalLM": GENERATE, "MistralForSequenceClassification": CLASSIFY, "MistralModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
)


POSITIONS = 262144
ROPE: JsonMapping = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""transformers' default of ``rope_parameters``."""

LARGEST_BETA = 1e3


def describe_ministral3(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Ministral3Config."""
    full_attention(c)
    if not c.is_given("rope_scaling") and not c.is_given("rope_parameters"):
        c = c.with_values(rope_parameters=ROPE)
    rope = c.within("rope_scaling" if c.is_given("rope_scaling") else "rope_parameters")
    beta = rope.number("llama_4_scaling_beta", 0, LARGEST_BETA)
    growth = QueryGrowth(beta, rope.integer("original_max_position_embeddings"))
    heads = heads_of(c.with_defaults({"num_key_value_heads": 8}), default=128)
    text = gated_decoder(c, heads, tied, positions=POSITIONS, qkv_bias=False)
    window = c.integer("sliding_window") if c.is_given("sliding_window") else 0
    return ParsedConfig(replace(text, window=window, query_growth=growth))


MINISTRAL3 = Family(
    name="Ministral-3 (text)",
    model_type="ministral3",
    architectures={
        "Ministral3ForCausalLM": GENERATE, "Ministral3ForSequenceClassification": CLASSIFY, "Ministral3Model": BARE,
    },
    config=describe_ministral3,
    names=StoredNames(PREFIXES),
)  # fmt: skip


def describe_mixtral(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' MixtralConfig."""
    full_attention(c)
    text = gated_decoder(c, heads_of(c), tied, positions=4096 * 32, theta=1e6, qkv_bias=False)
    experts = experts_of(c, "num_local_experts", 2, inner=text.intermediate, normalise=True)
    window = c.integer("sliding_window") if c.is_given("sliding_window") else 0
    return ParsedConfig(replace(text, window=window, experts=experts))


MIXTRAL = Family(
    name="Mixtral",
    model_type="mixtral",
    architectures={"MixtralForCausalLM": GENERATE, "MixtralForSequenceClassification": CLASSIFY, "MixtralModel": BARE},
    config=describe_mixtral,
    adapters=("attention",),
    names=StoredNames(
        PREFIXES,
        (
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        ),
    ),
    ignored=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
)
