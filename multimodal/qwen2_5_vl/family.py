"""The Qwen2.5-VL family: Qwen2's decoder with rotary positions on three axes, and the tower's configuration."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_config_parsers import MOST_LAYERS, WIDEST
from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import FACTOR, WINDOW_CELLS, Qwen25VisionConfig
from trencadis.multimodal.qwen2_vl.qwen_vl_hf_config import (
    PREFIXES,
    TOKEN_NAMES,
    check_aliases,
    check_patch_sizes,
    read_config,
    read_rope_theta,
    read_widths,
)

SILU = ("silu", "swish")


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen2_5_VLConfig, flat as on the hub or nested."""
    return read_config(root, c, tied, _read_vision)


def _read_vision(c: JsonFields, text_hidden: int) -> Qwen25VisionConfig:
    c.only("hidden_act", SILU, "silu")
    check_patch_sizes(c)
    window = WINDOW_CELLS * FACTOR
    if c.integer("window_size", default=window) // FACTOR != WINDOW_CELLS:
        c.refuse("window_size", f"implemented: windows of {window} pixels")
    hidden, heads, out_hidden = read_widths(c, "hidden_size", "out_hidden_size", text_hidden)
    depth = c.integer("depth", most=MOST_LAYERS)
    check_aliases(c, depth, heads, hidden)
    return Qwen25VisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST),
        out_hidden=out_hidden,
        full_layers=c.integers("fullatt_block_indexes", -MOST_LAYERS, MOST_LAYERS),
        tokens_per_second=c.number("tokens_per_second", 0, 10000, 4),
        rope_theta=read_rope_theta(c),
    )


FAMILY = Family(
    name="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    architectures={"Qwen2_5_VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES),
    make="trencadis.multimodal.qwen2_5_vl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.qwen2_vl.smart_resize:WINDOWED.load_needs",
        sizes="trencadis.multimodal.qwen2_vl.smart_resize:WINDOWED.load_resize_rule",
        processor="trencadis.multimodal.qwen2_vl.processor:load_windowed_processor",
        tokens=TOKEN_NAMES,
        positions="trencadis.multimodal.qwen2_vl.mrope:mrope_positions_by_seconds",
        windows=True,
    ),
    defaults={"fp32_softmax": True},
    adapters=EVERY_PART,
)
