"""Configuration of CLIP's tower up to a selected layer, read from config.json, and its weights' names. Torch-free.

Several families use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.decoder_config_parsers import activation_of
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.json_types import JsonObject
from trencadis.multimodal.vit.tile_vision_config import TileVisionConfig
from trencadis.multimodal.vit.vision_language_config import BLOCK_NAMES, ViTDefaults, read_vit_fields

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
