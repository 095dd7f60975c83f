"""The Idefics3 family: Llama's decoder, SigLIP over tiles, cells of up to 8 x 8 patches, one linear projector layer.

The SmolVLM2 family. Checkpoints of the first SmolVLM have Idefics3's model_type.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.vit.tile_vision_config import SiglipVisionConfig
from trencadis.multimodal.vit.vision_language_config import (
    BLOCK_NAMES,
    ViTDefaults,
    read_image_token,
    read_text_config,
    read_vit_fields,
)

IMAGE_TOKEN = 128257
VIT_DEFAULTS = ViTDefaults(1152, 16, 12, 3072, 224, 32, 1e-6, "gelu_pytorch_tanh")
VISION_MODEL_TYPES = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm")
"""Accepted model_type values of the tower; older files repeat the model's."""

MAX_MERGE = 8


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Idefics3Config."""
    text = read_text_config(root, c, tied, ("llama",))
    merge = root.integer("scale_factor", 1, MAX_MERGE, 2)
    fields = read_vit_fields(
        root.within("vision_config"), VISION_MODEL_TYPES, VIT_DEFAULTS, text.hidden, merge, exact=False
    )
    vision = SiglipVisionConfig(**fields, projector="", projector_bias=False)
    return ParsedConfig(
        text, vision, {"image_token_id": read_image_token(root, text.vocab, vision.rows_per_tile, IMAGE_TOKEN)}
    )


FAMILY = Family(
    name="Idefics3 and SmolVLM",
    model_type="idefics3",
    architectures={"Idefics3ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        {
            "model.vision_model.": "visual.",
            "model.connector.modality_projection.proj.": "visual.projector.linear_1.",
            "model.text_model.": "",
            "lm_head.": "lm_head.",
        },
        (
            *BLOCK_NAMES,
            (".post_layernorm.", ".last_norm."),
        ),
    ),
    make="trencadis.multimodal.idefics3.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.idefics3.processor:image_needs",
        sizes="trencadis.multimodal.idefics3.processor:image_sizes",
        processor="trencadis.multimodal.idefics3.processor:from_checkpoint",
        tokens={"image_token_id": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"vocab_size", "pad_token_id"}),
    adapters=EVERY_PART,
)


SMOLVLM = replace(
    FAMILY,
    name="SmolVLM2",
    model_type="smolvlm",
    architectures={"SmolVLMForConditionalGeneration": GENERATE},
)
