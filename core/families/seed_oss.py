"""Seed-OSS: Llama with biases on q, k and v, and an explicit head size."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' SeedOssConfig."""
    full_attention(c)
    return ParsedConfig(gated_decoder(
        c, heads_of(c, default=128), tied, positions=524288, qkv_bias=c.boolean("attention_bias", True),
        out_bias=c.boolean("attention_out_bias", False), mlp_bias=c.boolean("mlp_bias", False),
    ))  # fmt: skip


FAMILY = Family(
    name="Seed-OSS",
    model_type="seed_oss",
    architectures={"SeedOssForCausalLM": GENERATE, "SeedOssForSequenceClassification": CLASSIFY, "SeedOssModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
    ignored=frozenset({"residual_dropout"}),
)
