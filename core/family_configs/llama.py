"""Llama 1 to 3.3 and models of the same architecture, and its near relatives; biases only if config.json has them.

Seed-OSS has biases on q, k and v, and an explicit head size. In SmolLM3 every fourth layer has no rotary positions.
Granite 3 (dense) has four multipliers.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    full_attention,
    gated_decoder,
    heads_of,
    layer_types,
    windows_of,
)
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


def describe_seed_oss(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' SeedOssConfig."""
    full_attention(c)
    return ParsedConfig(gated_decoder(
        c, heads_of(c, default=128), tied, positions=524288, qkv_bias=c.boolean("attention_bias", True),
        out_bias=c.boolean("attention_out_bias", False), mlp_bias=c.boolean("mlp_bias", False),
    ))  # fmt: skip


SEED_OSS = Family(
    name="Seed-OSS",
    model_type="seed_oss",
    architectures={"SeedOssForCausalLM": GENERATE, "SeedOssForSequenceClassification": CLASSIFY, "SeedOssModel": BARE},
    config=describe_seed_oss,
    names=StoredNames(PREFIXES),
    ignored=frozenset({"residual_dropout"}),
)


def describe_smollm3(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' SmolLM3Config."""
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS)
    unrotated = _unrotated_layers(c, layers)
    asked = c.boolean("use_sliding_window", False) and c.is_given("sliding_window")
    window = c.integer("sliding_window") if asked else 0
    types = layer_types(c) or [SLIDING if window and i in unrotated else FULL for i in range(layers)]
    bias, windows = c.boolean("attention_bias", False), windows_of(c, window, types)
    text = gated_decoder(
        c, heads_of(c), tied, positions=32768, theta=2e6, qkv_bias=bias, out_bias=bias,
        mlp_bias=c.boolean("mlp_bias", False),
    )  # fmt: skip
    return ParsedConfig(replace(text, unrotated_layers=unrotated, **windows._asdict()))


def _unrotated_layers(c: JsonFields, layers: int) -> tuple[int, ...]:
    """Returns the layers without rotary positions: those with 0 in the list, or each at the end of an interval."""
    every = c.integer("no_rope_layer_interval", default=4)
    if not c.is_given("no_rope_layers"):
        return tuple(i for i in range(layers) if (i + 1) % every == 0)
    marks = c.integers("no_rope_layers", most=1)
    if len(marks) < layers:
        c.refuse("no_rope_layers", f"it must have an entry for each layer, and num_hidden_layers is {layers}")
    return tuple(i for i in range(layers) if not marks[i])


SMOLLM3 = Family(
    name="SmolLM3",
    model_type="smollm3",
    architectures={"SmolLM3ForCausalLM": GENERATE, "SmolLM3ForSequenceClassification": CLASSIFY, "SmolLM3Model": BARE},
    config=describe_smollm3,
    names=StoredNames(PREFIXES),
    tied=True,
)


def multiplier(c: JsonFields, key: str) -> float:
    """Reads a positive number; transformers' default of each multiplier is 1."""
    return c.number(key, 0, 1e6, 1.0, above=True)


def describe_granite(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
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


GRANITE = Family(
    name="Granite 3",
    model_type="granite",
    architectures={"GraniteForCausalLM": GENERATE, "GraniteModel": BARE},
    config=describe_granite,
    names=StoredNames(PREFIXES),
)
