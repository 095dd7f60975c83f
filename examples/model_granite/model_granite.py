"""IBM's Granite 3 with experts for Trencadis: Mixtral with four multipliers, in a package of its own."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import experts_of, full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs.llama import PREFIXES


def multiplier(c: JsonFields, key: str) -> float:
    """A positive number; transformers' default of each is 1."""
    return c.number(key, 0, 1e6, 1.0, above=True)


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """GraniteMoeConfig."""
    full_attention(c)
    bias = c.boolean("attention_bias", False)
    text = gated_decoder(c, heads_of(c, absent=True), tied, positions=2048, qkv_bias=bias, out_bias=bias)
    # ``attention_multiplier`` stands in the place of head_dim ** -0.5; what a rotary type does to scores stays.
    rotary = text.score_scale * text.head_dim**0.5
    return ParsedConfig(
        replace(
            text,
            experts=experts_of(c, "num_local_experts", 2, inner=text.intermediate, normalise=True),
            scale=rotary * multiplier(c, "attention_multiplier"),
            embedding_scale=multiplier(c, "embedding_multiplier"),
            residual_scale=multiplier(c, "residual_multiplier"),
            logit_scale=1 / multiplier(c, "logits_scaling"),
        )
    )


NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".input_linear.weight", ".experts.gate_up_proj"),
    (".output_linear.weight", ".experts.down_proj"),
    (".router.layer.", ".gate."),
    (".router.", ".gate."),
)

FAMILY = Family(
    name="Granite 3 with experts",
    model_type="granitemoe",
    architectures={"GraniteMoeForCausalLM": GENERATE, "GraniteMoeModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES, NAMES),
    ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
