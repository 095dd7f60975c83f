"""The InternVL3 family (-hf checkpoints): InternViT over tiles, cells of 2 x 2.

The decoder is one of Qwen2, Qwen3 (with experts or without) or Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.decoder_config_parsers import activation_of
from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.vit.tile_vision_config import TileVisionConfig
from trencadis.multimodal.vit.vision_language_config import (
    PREFIXES,
    ViTDefaults,
    read_image_token,
    read_text_config,
    read_vit_fields,
)

IMAGE_TOKEN = 151667
VIT_DEFAULTS = ViTDefaults(1024, 16, 24, 4096, 448, 14, 1e-6, "gelu")
MERGE_BY_DOWNSAMPLE_RATIO = {1.0: 1, 0.5: 2, 0.25: 4}


@dataclass(frozen=True)
class InternVisionConfig(TileVisionConfig):
    """InternViT with 300M weights: a class token, and scaled layer outputs."""

    cell_norm: ClassVar[bool] = True
    layer_scale: ClassVar[bool] = True


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' InternVLConfig."""
    text = read_text_config(root, c, tied, ("qwen2", "qwen3", "llama", "qwen3_moe"))
    ratio = root.number("downsample_ratio", 0, 1, 0.5, above=True)
    if ratio not in MERGE_BY_DOWNSAMPLE_RATIO:
        root.refuse("downsample_ratio", "implemented: 1, 0.5, 0.25")
    root.only("vision_feature_select_strategy", ("default",), "default")
    root.only("vision_feature_layer", (-1,), -1)
    v = root.within("vision_config")
    for key, only in (
        ("use_qk_norm", False), ("norm_type", "layer_norm"), ("use_absolute_position_embeddings", True),
        ("use_mean_pooling", True),
    ):  # fmt: skip
        v.only(key, (only,), only)
    fields = read_vit_fields(v, ("internvl_vision",), VIT_DEFAULTS, text.hidden, MERGE_BY_DOWNSAMPLE_RATIO[ratio])
    projector = activation_of(root, "projector_hidden_act", "gelu")
    vision = InternVisionConfig(**fields, projector=projector, qkv_bias=v.boolean("attention_bias", False))
    return ParsedConfig(
        text, vision, {"image_token_id": read_image_token(root, text.vocab, vision.rows_per_tile, IMAGE_TOKEN)}
    )


FAMILY = Family(
    name="InternVL3",
    model_type="internvl",
    architectures={"InternVLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        PREFIXES,
        (
            (".encoder.layer.", ".blocks."),
            (".patch_embeddings.projection.", ".patch_embedding."),
            (".layernorm_before.", ".norm1."),
            (".layernorm_after.", ".norm2."),
            (".attention.projection_layer.", ".self_attn.out_proj."),
            (".attention.", ".self_attn."),
            (".mlp.fc1.", ".mlp.up_proj."),
            (".mlp.fc2.", ".mlp.down_proj."),
            (".projector.layer_norm.", ".projector.cell_norm."),
        ),
    ),
    make="trencadis.multimodal.internvl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.internvl.processor:image_needs",
        sizes="trencadis.multimodal.internvl.processor:image_sizes",
        processor="trencadis.multimodal.internvl.processor:from_checkpoint",
        tokens={"image_token_id": "<IMG_CONTEXT>"},
    ),
    pooling=None,
    tied=True,
    ignored=frozenset({"vocab_size"}),
    adapters=EVERY_PART,
)
