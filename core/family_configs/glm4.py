"""GLM-4-0414: norms around attention and MLP; half of a head is rotated, in pairs of adjacent values."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import SANDWICH
from trencadis.core.family_configs.llama import PREFIXES

POSITIONS = 131072
"""transformers' default of ``max_position_embeddings``."""

DEFAULTS = {"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5}

NORM_NAMES = (
    (".post_self_attn_layernorm.", ".attention_out_layernorm."),
    (".post_mlp_layernorm.", ".mlp_out_layernorm."),
)
"""Stored names of the norms after attention and MLP -> canonical ones."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Glm4Config."""
    full_attention(c)
    for key in ("rope_scaling", "rope_parameters"):
        rope = c.within(key)
        rope.only("rope_type" if "rope_type" in rope.values else "type", ("default",), "default")
    bias = c.boolean("attention_bias", True)
    text = gated_decoder(
        c.with_defaults(DEFAULTS), heads_of(c, default=128), tied, positions=POSITIONS, trained=POSITIONS,
        qkv_bias=bias, norm_placement=SANDWICH,
    )  # fmt: skip
    return ParsedConfig(replace(text, adjacent_pairs=True))


FAMILY = Family(
    name="GLM-4-0414",
    model_type="glm4",
    architectures={"Glm4ForCausalLM": GENERATE, "Glm4ForSequenceClassification": CLASSIFY, "Glm4Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES, NORM_NAMES),
)
