"""The Phi-3.5-vision family: Phi-3's decoder, CLIP's tower over tiles, cells of 2 x 2 patches, separator rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs import phi3
from trencadis.multimodal.llava.family import CLIP_NAMES, ClipVisionConfig
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PLANES
from trencadis.multimodal.vit.vision_language_config import ViTDefaults, read_image_token, read_vit_fields

NEWLINE, SEPARATOR = range(2)
"""Constant rows: the first follows each line of cells, the second separates an image's tiles from the whole image."""


@dataclass(frozen=True)
class Phi3VVisionConfig(ClipVisionConfig):
    """CLIP over tiles whose values have three bytes each (``bytes_per_value``)."""

    constants: ClassVar[int] = 2
    without_adapters: ClassVar[tuple[str, ...]] = ("visual.projector",)  # which the constant rows pass, too
    bytes_per_value: ClassVar[int] = PLANES


IMAGE_TOKEN = 32044
CLIP_MODEL = "openai/clip-vit-large-patch14-336"
VIT_DEFAULTS = ViTDefaults(1024, 16, 24, 4096, 336, 14, 1e-5, "quick_gelu")
"""Sizes of the published tower, which config.json does not repeat; those that a file has take precedence."""

MERGE = 2


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Phi3VConfig."""
    text = phi3.describe(root, c, tied).text
    joins = root.within("embd_layer")
    for key, only in (
        ("embedding_cls", "image"), ("projection_cls", "mlp"), ("use_hd_transform", True),
        ("with_learnable_separator", True), ("hd_transform_order", "sub_glb"),
    ):  # fmt: skip
        joins.only(key, (only,))
    p = root.within("img_processor")
    p.only("name", ("clip_vision_model",))
    p.only("model_name", (CLIP_MODEL,))
    p.only("type_feature", ("patch",), "patch")
    fields = read_vit_fields(p, ("clip_vision_model",), VIT_DEFAULTS, text.hidden, MERGE)
    layers = fields["depth"]
    depth = layers + 1 + p.integer("layer_idx", -layers, -1, -2)
    vision = Phi3VVisionConfig(**{**fields, "depth": depth, "more_layers": layers - depth})
    p.only("image_dim_out", (vision.hidden,))
    p.only("num_img_tokens", (vision.rows_per_tile,))
    return ParsedConfig(text, vision, {"image_token_id": read_image_token(root, text.vocab, 0, IMAGE_TOKEN)})


_VISION_PREFIX = "model.vision_embed_tokens."
FAMILY = Family(
    name="Phi-3.5-vision",
    model_type="phi3_v",
    architectures={"Phi3VForCausalLM": GENERATE},
    config=describe,
    names=StoredNames(
        {
            f"{_VISION_PREFIX}img_processor.vision_model.": "visual.",
            f"{_VISION_PREFIX}img_processor.": "visual.",
            f"{_VISION_PREFIX}img_projection.0.": "visual.projector.linear_1.",
            f"{_VISION_PREFIX}img_projection.2.": "visual.projector.linear_2.",
            f"{_VISION_PREFIX}wte.": "embed_tokens.",
            _VISION_PREFIX: "visual.",
            "model.": "",
            "lm_head.": "lm_head.",
        },
        CLIP_NAMES,
    ),
    make="trencadis.multimodal.phi3_v.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.phi3_v.processor:image_needs",
        sizes="trencadis.multimodal.phi3_v.processor:image_sizes",
        processor="trencadis.multimodal.phi3_v.processor:from_checkpoint",
        tokens={"image_token_id": "<|image|>"},
        numbered=("<|image_", "|>"),
    ),
    ignored=phi3.FAMILY.ignored | {"image_token_index"},
    adapters=EVERY_PART,
)
