"""Mistral 7B 0.1 to 0.3, Nemo and models of the same architecture: Llama without biases, some with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES

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
