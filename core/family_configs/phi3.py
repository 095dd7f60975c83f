"""Phi-3, Phi-3.5 and Phi-4 (mini): Llama with fused matrices, partly rotated heads, and LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs.llama import PREFIXES

TRAINED = 4096
"""transformers' default of ``original_max_position_embeddings`` and of ``max_position_embeddings``."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Phi3Config."""
    full_attention(c)
    heads = heads_of(c, absent=True)
    text = gated_decoder(c, heads, tied, positions=TRAINED, qkv_bias=False, trained=TRAINED)
    window = c.integer("sliding_window") if c.is_given("sliding_window") else 0
    return ParsedConfig(replace(text, window=window))


FAMILY = Family(
    name="Phi-3",
    model_type="phi3",
    architectures={"Phi3ForCausalLM": GENERATE, "Phi3ForSequenceClassification": CLASSIFY, "Phi3Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
    ignored=frozenset({"attention_bias", "embd_pdrop", "resid_pdrop"}),
)
