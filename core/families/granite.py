"""Granite 3 (dense): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES


def multiplier(c: JsonFields, key: str) -> float:
    """Reads a positive number; transformers' default of each multiplier is 1."""
    return c.number(key, 0, 1e6, 1.0, above=True)


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' GraniteConfig."""
    full_attention(c)
    bias, mlp = c.boolean("attention_bias", False), c.boolean("mlp_bias", False)
    text = gated_decoder(c, heads_of(c, absent=True), tied, positions=2048, qkv_bias=bias, out_bias=bias, mlp_bias=mlp)
    # ``attention_multiplier`` replaces head_dim ** -0.5; the factor of a rotary type stays.
    rotary = text.score_scale * text.head_dim**0.5
    return ParsedConfig(
        replace(
            text,
            scale=rotary * multiplier(c, "attention_multiplier"),
            embedding_scale=multiplier(c, "embedding_multiplier"),
            residual_scale=multiplier(c, "residual_multiplier"),
            logit_scale=1 / multiplier(c, "logits_scaling"),
        )
    )


FAMILY = Family(
    name="Granite 3",
    model_type="granite",
    architectures={"GraniteForCausalLM": GENERATE, "GraniteModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
)
