"""The Qwen2-VL family (and QVQ): Qwen2's decoder with rotary positions on three axes, a tower without windows."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_config_parsers import MOST_LAYERS, activation_of
from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import CHANNELS, PATCH, Qwen2VisionConfig
from trencadis.multimodal.qwen2_vl.qwen_vl_hf_config import (
    PREFIXES,
    TOKEN_NAMES,
    check_aliases,
    check_patch_sizes,
    read_config,
    read_rope_theta,
    read_widths,
)

MAX_MLP_RATIO = 64


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen2VLConfig, flat as on the hub or nested."""
    return read_config(root, c, tied, _read_vision)


def _read_vision(c: JsonFields, text_hidden: int) -> Qwen2VisionConfig:
    check_patch_sizes(c)
    # The hub's files have these two keys too; transformers reads neither.
    c.only("spatial_patch_size", (PATCH,), PATCH)
    c.only("in_chans", (CHANNELS,), CHANNELS)
    hidden, heads, out_hidden = read_widths(c, "embed_dim", "hidden_size", text_hidden)
    depth = c.integer("depth", most=MOST_LAYERS)
    check_aliases(c, depth, heads, hidden)
    return Qwen2VisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=int(hidden * c.number("mlp_ratio", 0, MAX_MLP_RATIO, 4, above=True)),
        out_hidden=out_hidden,
        full_layers=tuple(range(depth)),
        rope_theta=read_rope_theta(c),
        hidden_act=activation_of(c, "hidden_act", "quick_gelu"),
    )


FAMILY = Family(
    name="Qwen2-VL",
    model_type="qwen2_vl",
    architectures={"Qwen2VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, inner=((".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj."))),
    make="trencadis.multimodal.qwen2_vl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.qwen2_vl.smart_resize:WHOLE.load_needs",
        sizes="trencadis.multimodal.qwen2_vl.smart_resize:WHOLE.load_resize_rule",
        processor="trencadis.multimodal.qwen2_vl.processor:load_processor",
        tokens=TOKEN_NAMES,
        positions="trencadis.multimodal.qwen2_vl.mrope:mrope_positions_by_frames",
    ),
    defaults={"fp32_softmax": True},
    adapters=EVERY_PART,
)
