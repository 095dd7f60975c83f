"""Qwen3 (dense): per-head norms of q and k, an explicit head size, and no biases by default."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import gated_decoder, heads_of, some_windows
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3Config."""
    parts = {"qk_norm": True, **some_windows(c)._asdict()}
    bias = c.boolean("attention_bias", False)
    heads = heads_of(c, default=128)
    return ParsedConfig(gated_decoder(c, heads, tied, positions=32768, qkv_bias=bias, out_bias=bias, **parts))


FAMILY = Family(
    name="Qwen3",
    model_type="qwen3",
    architectures={"Qwen3ForCausalLM": GENERATE, "Qwen3ForSequenceClassification": CLASSIFY, "Qwen3Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
)
