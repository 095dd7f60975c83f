"""LLaVA-NeXT: CLIP's tower over tiles, and a constant row that ends each line of an image."""

from __future__ import annotations

from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend
from trencadis.multimodal.llava.model import LlavaModel
from trencadis.multimodal.llava.processor import read_settings
from trencadis.multimodal.llava_next.processor import PROCESSOR_TYPES
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP
from trencadis.multimodal.vit.tile_image_processor import get_vision_config, has_processor_settings


class LlavaNextModel(LlavaModel):
    """A decoder with CLIP's tower and the newline row."""

    def load_constant_rows(self, source: WeightSource) -> Tensor:
        return source.take("visual.image_newline", (self.tower.out_hidden,))[None]


def make(config: ModelConfig, backend: Backend) -> LlavaNextModel:
    """Builds the model; named in the family's record."""
    known = has_processor_settings(config.path)
    return LlavaNextModel(
        config, backend, read_settings(config.path, get_vision_config(config).image, PROCESSOR_TYPES) if known else CLIP
    )
