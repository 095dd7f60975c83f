"""SmolLM3: Llama in which every fourth layer has no rotary positions."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    gated_decoder,
    heads_of,
    layer_types,
    windows_of,
)
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.families.llama import PREFIXES


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
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


FAMILY = Family(
    name="SmolLM3",
    model_type="smollm3",
    architectures={"SmolLM3ForCausalLM": GENERATE, "SmolLM3ForSequenceClassification": CLASSIFY, "SmolLM3Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
    tied=True,
)
