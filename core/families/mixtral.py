"""Mixtral: Mistral with experts in every layer; the published models use two of eight per token."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import experts_of, full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' MixtralConfig."""
    full_attention(c)
    text = gated_decoder(c, heads_of(c), tied, positions=4096 * 32, theta=1e6, qkv_bias=False)
    experts = experts_of(c, "num_local_experts", 2, inner=text.intermediate, normalise=True)
    window = c.integer("sliding_window") if c.is_given("sliding_window") else 0
    return ParsedConfig(replace(text, window=window, experts=experts))


FAMILY = Family(
    name="Mixtral",
    model_type="mixtral",
    architectures={"MixtralForCausalLM": GENERATE, "MixtralForSequenceClassification": CLASSIFY, "MixtralModel": BARE},
    config=describe,
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
