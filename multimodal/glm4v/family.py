"""The GLM-4.1V, GLM-4.6V-Flash and GLM-OCR families: GLM-4's decoder with rotary positions on three axes, and the
tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    activation_of,
    full_attention,
    gated_decoder,
    heads_of,
)
from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import SANDWICH, TextConfig
from trencadis.core.family_configs.glm4 import NORM_NAMES
from trencadis.multimodal.glm4v.config import CHANNELS, FRAMES, Glm4vVisionConfig
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import MERGE, PATCH
from trencadis.multimodal.qwen2_vl.qwen_vl_hf_config import PREFIXES, check_aliases, read_rope_theta

POSITIONS = 32768
SECTION = (8, 12, 12)
MEDIA_IDS = {
    "image_token_id": 151343, "video_token_id": 151344, "image_start_token_id": 151339, "image_end_token_id": 151340,
}  # fmt: skip
"""Defaults of transformers' Glm4vConfig."""

KEYS = {"image_start_token_id": "vision_start_token_id", "image_end_token_id": "vision_end_token_id"}
"""Keys of its files -> those of other families for the same tokens."""

OCR_MEDIA_IDS = {"image_token_id": 59280}
"""Those of GlmOcrConfig; its videos are not served."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Glm4vConfig and Glm46VConfig."""
    text = _read_text(root, c, tied, "glm4v_text", bias=True)
    return _describe_config(root, text, _read_vision(root.within("vision_config"), text.hidden), MEDIA_IDS)


def describe_ocr(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' GlmOcrConfig."""
    text = _read_text(root, c, tied, "glm_ocr_text", bias=False)
    vision = _read_ocr_vision(root.within("vision_config"), text.hidden)
    return _describe_config(root, text, vision, OCR_MEDIA_IDS)


def _describe_config(
    root: JsonFields, text: TextConfig, vision: Glm4vVisionConfig, ids: Mapping[str, int]
) -> ParsedConfig:
    """Returns the parsed parts; the marks around an image are those around each temporal patch of a video."""
    found = {
        key: root.integer(key, 0, text.vocab - 1) if key in root.values else (default if default < text.vocab else -1)
        for key, default in ids.items()
    }
    return ParsedConfig(text, vision, {KEYS.get(key, key): id for key, id in found.items()})


def _read_text(root: JsonFields, c: JsonFields, tied: bool, kind: str, bias: bool) -> TextConfig:
    if c is root:
        root.refuse("text_config", "it must be an object")
    c.only("model_type", (kind,), kind)
    full_attention(c)
    rope = c.within("rope_scaling" if c.is_given("rope_scaling") else "rope_parameters")
    rope.only("rope_type" if "rope_type" in rope.values else "type", ("default",), "default")
    text = gated_decoder(
        c.with_defaults({"rms_norm_eps": 1e-5}), heads_of(c, whole=bias), tied, positions=POSITIONS if bias else 131072,
        trained=POSITIONS, qkv_bias=bias, norm_placement=SANDWICH,
    )  # fmt: skip
    section = rope.integers("mrope_section", length=3) if "mrope_section" in rope.values else SECTION
    if sum(section) * 2 != (text.rotary_dim or text.head_dim):
        rope.refuse(
            "mrope_section", f"it must sum to {(text.rotary_dim or text.head_dim) // 2}, half of what is rotated"
        )
    return replace(text, adjacent_pairs=True, mrope_section=(section[0], section[1], section[2]))


def _read_ocr_vision(c: JsonFields, text_hidden: int) -> Glm4vVisionConfig:
    """Reads GLM-OCR's tower: no learned positions, norms of the heads, biases everywhere, another merger."""
    defaults = {"hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "intermediate_size": 4096}
    made = _read_vision(c.with_defaults({**defaults, "attention_bias": True}), text_hidden, "glm_ocr_vision")
    return replace(
        made, side=0, intermediate=made.context, context=made.out_hidden * CHANNELS, other_biases=made.qkv_bias,
        head_norms=True,
    )  # fmt: skip


def _read_vision(c: JsonFields, text_hidden: int, kind: str = "glm4v_vision") -> Glm4vVisionConfig:
    for key, value in (
        ("model_type", kind), ("patch_size", PATCH), ("temporal_patch_size", FRAMES),
        ("spatial_merge_size", MERGE), ("in_channels", CHANNELS),
    ):  # fmt: skip
        c.only(key, (value,), value)
    hidden, heads = c.integer("hidden_size", most=WIDEST, default=1536), c.integer("num_heads", 1, MOST_HEADS, 12)
    if hidden % (4 * heads):
        c.refuse("num_heads", f"implemented: heads whose size is a multiple of 4, and hidden_size is {hidden}")
    out = c.integer("out_hidden_size", most=WIDEST, default=4096)
    if out != text_hidden:
        c.refuse("out_hidden_size", f"it must be the text model's hidden_size, which is {text_hidden}")
    depth = c.integer("depth", most=MOST_LAYERS, default=24)
    check_aliases(c, depth, heads, hidden)
    image = c.integer("image_size", PATCH, WIDEST, 336)
    return Glm4vVisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=out,  # of the layers; the key is that of the merger
        out_hidden=out,
        side=image // PATCH,
        context=c.integer("intermediate_size", most=WIDEST, default=13696),
        eps=c.number("rms_norm_eps", 0, 1, 1e-5, above=True),
        activation=activation_of(c, "hidden_act", "silu"),
        rope_theta=read_rope_theta(c),
        patch=PATCH,
        merge=MERGE,
        qkv_bias=c.boolean("attention_bias", False),
    )


VISION_SIDE = VisionSide(
    needs="trencadis.multimodal.glm4v.processor:PATCH_SCHEME.load_needs",
    sizes="trencadis.multimodal.glm4v.processor:PATCH_SCHEME.load_resize_rule",
    processor="trencadis.multimodal.glm4v.processor:load_processor",
    tokens={
        "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
    },
    expand="trencadis.multimodal.glm4v.processor:expand_frames",
    positions="trencadis.multimodal.qwen2_vl.mrope:mrope_positions_by_frames",
    times="trencadis.multimodal.glm4v.processor:format_whole_seconds",
)  # fmt: skip
MEDIA_KEYS = frozenset(
    {"image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id", "attention_bias"}
)
FAMILY = Family(
    name="GLM-4.1V",
    model_type="glm4v",
    architectures={"Glm4vForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, NORM_NAMES),
    make="trencadis.multimodal.glm4v.model:make",
    vision=VISION_SIDE,
    ignored=MEDIA_KEYS,
    adapters=EVERY_PART,
)
FLASH = replace(
    FAMILY,
    name="GLM-4.6V-Flash",
    model_type="glm46v",
    architectures={"Glm46VForConditionalGeneration": GENERATE},
    vision=replace(VISION_SIDE, times="trencadis.multimodal.glm4v.processor:format_seconds"),
)
OCR = replace(
    FAMILY,
    name="GLM-OCR",
    model_type="glm_ocr",
    architectures={"GlmOcrForConditionalGeneration": GENERATE},
    config=describe_ocr,
    vision=replace(VISION_SIDE, tokens={"image_token_id": "<|image|>"}, times=""),
)
