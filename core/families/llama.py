"""Llama 1 to 3.3 and models of the same architecture; biases only if config.json has them."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields

PREFIXES = {"model.": "", "lm_head.": "lm_head.", "score.": "score.", "": ""}
"""Stored prefix -> canonical prefix.

The last entry is for checkpoints of the bare decoder, whose names have no prefix.
"""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' LlamaConfig."""
    full_attention(c)
    bias = c.boolean("attention_bias", False)
    heads = heads_of(c, absent=True)
    mlp = c.boolean("mlp_bias", False)
    return ParsedConfig(gated_decoder(c, heads, tied, positions=2048, qkv_bias=bias, out_bias=bias, mlp_bias=mlp))


FAMILY = Family(
    name="Llama",
    model_type="llama",
    architectures={"LlamaForCausalLM": GENERATE, "LlamaForSequenceClassification": CLASSIFY, "LlamaModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
)
