"""Gemma-3 text models: norms of 1 + weight around attention and MLP; five of six layers have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    gated_decoder,
    heads_of,
    layer_types,
    rotary_tables,
    windows_of,
)
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import RMS_ONE, SANDWICH
from trencadis.core.checkpoint.rope_config import LARGEST_BASE
from trencadis.core.family_configs.llama import PREFIXES
from trencadis.core.json_types import JsonObject

GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4
PATTERN = 6
"""Default of ``sliding_window_pattern``: every sixth layer has full attention."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Gemma3TextConfig."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if c.is_given(key):
            c.refuse(key, "implemented: scores and logits as they are (null)")
    if c.is_given("use_bidirectional_attention"):
        c.only("use_bidirectional_attention", (False,))
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS)
    every = c.integer("sliding_window_pattern", default=PATTERN)
    types = layer_types(c) or [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    none = "sliding_window" in c.values and not c.is_given("sliding_window")
    windows = windows_of(c, 0 if none else c.integer("sliding_window", default=4096), types)
    bias = c.boolean("attention_bias", False)
    tables, local = _rotary(c)
    heads = heads_of(c, default=256)
    text = gated_decoder(
        tables, heads, tied, positions=131072, theta=GLOBAL_BASE, act=("hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=bias, out_bias=bias, norm=RMS_ONE, norm_placement=SANDWICH, qk_norm=True, local_theta=local,
        embedding_scale=heads.hidden**0.5, **windows._asdict(),
    )  # fmt: skip
    return ParsedConfig(replace(text, scale=c.integer("query_pre_attn_scalar", default=256) ** -0.5))


def _rotary(c: JsonFields) -> tuple[JsonFields, float]:
    """Returns (fields whose only rotary table is that of the full-attention layers, base of the other layers'
    table).
    """
    sliding, full = rotary_tables(c)
    outer = (c, "rope_local_base_freq")
    source, name = (sliding, "rope_theta") if "rope_theta" in sliding.values else outer
    local = source.number(name, 0, LARGEST_BASE, LOCAL_BASE, above=True)
    scaling = c.within("rope_scaling")
    table: JsonObject = {**full.values, **scaling.values}
    kind = "rope_type" if "rope_type" in table else "type"
    JsonFields(table, c.where, "rope_parameters.full_attention.").only(kind, ("default", "linear"), "default")
    if c.is_given("rope_theta"):
        table.setdefault("rope_theta", c.values["rope_theta"])
    return c.with_values(rope_scaling=None, rope_parameters=table), local


FAMILY = Family(
    name="Gemma-3 (text)",
    model_type="gemma3_text",
    architectures={
        "Gemma3ForCausalLM": GENERATE, "Gemma3TextForSequenceClassification": CLASSIFY, "Gemma3TextModel": BARE,
    },
    config=describe,
    names=StoredNames(
        PREFIXES,
        (
            (".post_attention_layernorm.", ".attention_out_layernorm."),
            (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
            (".post_feedforward_layernorm.", ".mlp_out_layernorm."),
        ),
    ),
    tied=True,
    ignored=frozenset({"_sliding_window_pattern", "cache_implementation", "hidden_act"}),
)  # fmt: skip
