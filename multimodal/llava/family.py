"""The LLaVA-1.5 family: CLIP's tower up to the selected layer, a projector; also Pixtral-12B. Torch-free.

The decoder is one of Llama, Mistral, Qwen2 or Qwen3. Other families use the configuration of the tower, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.decoder_config_parsers import activation_of
from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.json_types import JsonObject
from trencadis.multimodal.pixtral.config import VIT_DEFAULTS, WEIGHT_NAMES, PixtralVisionConfig, read_pixtral_fields
from trencadis.multimodal.vit.tile_vision_config import TileVisionConfig
from trencadis.multimodal.vit.vision_language_config import (
    BLOCK_NAMES,
    PREFIXES,
    ViTDefaults,
    read_image_token,
    read_text_config,
    read_vit_fields,
)

IMAGE_TOKEN = 32000
"""Default of ``image_token_index``."""


@dataclass(frozen=True)
class ClipVisionConfig(TileVisionConfig):
    """CLIP's vision tower up to the layer whose output is used (``depth`` layers); ``more_layers`` follow them."""

    first_norm: ClassVar[bool] = True
    more_layers: int = 0

    @property
    def unused_layers(self) -> int:
        return self.more_layers


CLIP_DEFAULTS = ViTDefaults(768, 12, 12, 3072, 224, 32, 1e-5, "quick_gelu")


def read_clip_fields(root: JsonFields, c: JsonFields, width: int) -> JsonObject:
    """Returns the fields of a ``ClipVisionConfig`` that ends with the selected layer.

    ``width``: the decoder's hidden size.
    """
    root.only("vision_feature_select_strategy", ("default",), "default")
    fields = read_vit_fields(c, ("clip_vision_model",), CLIP_DEFAULTS, width)
    layers = fields["depth"]
    feature_layer = root.integer("vision_feature_layer", -layers - 1, layers, -2)
    depth = feature_layer if feature_layer >= 0 else layers + 1 + feature_layer
    if depth < 1:
        root.refuse("vision_feature_layer", f"implemented: the output of one of the {layers} layers")
    projector = activation_of(root, "projector_hidden_act", "gelu")
    biased = root.boolean("multimodal_projector_bias", True)
    return {**fields, "depth": depth, "more_layers": layers - depth, "projector": projector, "projector_bias": biased}


CLIP_NAMES = (*BLOCK_NAMES, (".pre_layrnorm.", ".first_norm."))


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' LlavaConfig; the vision_config tells if it is Pixtral-12B."""
    vision_fields = root.within("vision_config")
    if vision_fields.values.get("model_type") == "pixtral":
        text = read_text_config(root, c, tied, ("mistral",))
        root.only("vision_feature_select_strategy", ("full",), "default")
        pixtral = PixtralVisionConfig(
            **read_pixtral_fields(root, vision_fields, text.hidden, VIT_DEFAULTS, biased=True)
        )
        return ParsedConfig(text, pixtral, {"image_token_id": read_image_token(root, text.vocab, 0, IMAGE_TOKEN)})
    text = read_text_config(root, c, tied, ("llama", "mistral", "qwen2", "qwen3"))
    vision = ClipVisionConfig(**read_clip_fields(root, vision_fields, text.hidden))
    return ParsedConfig(
        text, vision, {"image_token_id": read_image_token(root, text.vocab, vision.rows_per_tile, IMAGE_TOKEN)}
    )


FAMILY = Family(
    name="LLaVA-1.5 and Pixtral",
    model_type="llava",
    architectures={"LlavaForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, (*CLIP_NAMES, *WEIGHT_NAMES)),
    make="trencadis.multimodal.llava.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.llava.processor:image_needs",
        sizes="trencadis.multimodal.llava.processor:image_sizes",
        processor="trencadis.multimodal.llava.processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"ignore_index", "vocab_size"}),
    adapters=EVERY_PART,
)
