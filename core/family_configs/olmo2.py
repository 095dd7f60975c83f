"""OLMo-2 and OLMo-3: norms after attention and MLP alone; one norm over all heads of q, and one over all of k.

OLMo-3 has a sliding window in three of four layers; the scaling of positions is that of the others.
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
    rotary_tables,
    windows_of,
)
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import OUT
from trencadis.core.checkpoint.rope_config import LARGEST_BASE
from trencadis.core.family_configs.llama import PREFIXES
from trencadis.core.json_types import JsonObject

POSITIONS = 2048
"""transformers' default of ``max_position_embeddings``."""

NORM_NAMES = (
    (".post_attention_layernorm.", ".input_layernorm."),
    (".post_feedforward_layernorm.", ".post_attention_layernorm."),
)
"""Stored names of the norms after attention and MLP -> canonical ones."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Olmo2Config."""
    full_attention(c)
    bias = c.boolean("attention_bias", False)
    return ParsedConfig(gated_decoder(
        c.with_defaults({"rms_norm_eps": 1e-5}), heads_of(c, absent=True), tied, positions=POSITIONS, qkv_bias=bias,
        out_bias=bias, norm_placement=OUT, joint_qk_norm=True,
    ))  # fmt: skip


FAMILY = Family(
    name="OLMo-2",
    model_type="olmo2",
    architectures={"Olmo2ForCausalLM": GENERATE, "Olmo2ForSequenceClassification": CLASSIFY, "Olmo2Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES, NORM_NAMES),
)


BASE = 5e5
"""transformers' default of ``rope_theta``."""

PATTERN = 4
"""Without ``layer_types`` every fourth layer has full attention."""


def describe_olmo3(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Olmo3Config."""
    if c.is_given("is_causal"):
        c.only("is_causal", (True,))
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS)
    types = layer_types(c) or [SLIDING if (i + 1) % PATTERN else FULL for i in range(layers)]
    none = "sliding_window" in c.values and not c.is_given("sliding_window")
    windows = windows_of(c, 0 if none else c.integer("sliding_window", default=4096), types)
    tables, local = _olmo3_rotary(c)
    bias = c.boolean("attention_bias", False)
    text = gated_decoder(
        tables.with_defaults({"rms_norm_eps": 1e-5}), heads_of(c, absent=True), tied, positions=POSITIONS, theta=BASE,
        qkv_bias=bias, out_bias=bias, norm_placement=OUT, joint_qk_norm=True, **windows._asdict(),
    )  # fmt: skip
    own = windows.window and (text.rope_scaling is not None or text.rope_theta != local)
    return ParsedConfig(replace(text, local_theta=local if own else 0.0))


def _olmo3_rotary(c: JsonFields) -> tuple[JsonFields, float]:
    """Returns (fields whose only rotary table is that of layers with full attention, base of the others' table).

    A base beside the tables is that of full attention alone, as in transformers, whose other layers take the default.
    """
    sliding, full = rotary_tables(c)
    local = sliding.number("rope_theta", 0, LARGEST_BASE, BASE, above=True)
    table: JsonObject = {**full.values, **c.within("rope_scaling").values}
    if c.is_given("rope_theta"):
        table.setdefault("rope_theta", c.values["rope_theta"])
    return c.with_values(rope_scaling=None, rope_parameters=table), local


OLMO3 = Family(
    name="OLMo-3",
    model_type="olmo3",
    architectures={"Olmo3ForCausalLM": GENERATE, "Olmo3ForSequenceClassification": CLASSIFY, "Olmo3Model": BARE},
    config=describe_olmo3,
    names=StoredNames(PREFIXES, NORM_NAMES),
)
