"""Qwen3.5, 3.6 and 3.8 with images: a decoder with recurrent layers (``core.families.qwen3_5``), and Qwen3-VL's tower
without DeepStack. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.family import GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.families.qwen3_5 import IGNORED, SKIPPED, read_decoder
from trencadis.core.families.qwen3_5_moe import ROUTING, read_expert_decoder
from trencadis.multimodal.qwen2_vl.qwen_vl_hf_config import PREFIXES, read_media_tokens
from trencadis.multimodal.qwen3_vl.family import VISION_SIDE, WEIGHT_NAMES, read_vision

MEDIA_IDS = {
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
}  # fmt: skip
"""Defaults of transformers' Qwen3_5Config."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5Config, whose file has no key for DeepStack. Only the root's key ties the head."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    return _describe(root, read_decoder(c, root.boolean("tie_word_embeddings", False)))


def describe_experts(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5MoeConfig."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    return _describe(root, read_expert_decoder(c, root.boolean("tie_word_embeddings", False)))


def _describe(root: JsonFields, text: TextConfig) -> ParsedConfig:
    vision = read_vision(root.within("vision_config"), text.hidden, ())
    return ParsedConfig(text, vision, read_media_tokens(root, text.vocab, MEDIA_IDS))


FAMILY = Family(
    name="Qwen3.5 with images",
    model_type="qwen3_5",
    architectures={"Qwen3_5ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, WEIGHT_NAMES),
    make="trencadis.multimodal.qwen3_vl.model:make",
    vision=VISION_SIDE,
    ignored=IGNORED,
    skipped=SKIPPED,
    adapters=(),
)
EXPERTS = replace(
    FAMILY,
    name="Qwen3.5 with experts and images",
    model_type="qwen3_5_moe",
    architectures={"Qwen3_5MoeForConditionalGeneration": GENERATE},
    config=describe_experts,
    ignored=IGNORED | ROUTING,
)
