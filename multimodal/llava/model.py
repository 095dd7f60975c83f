"""LLaVA-1.5: Llama's decoder, and CLIP's tower on packed slots."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend
from trencadis.core.models.decoder import Decoder
from trencadis.multimodal.llava.processor import PROCESSOR_TYPES, read_settings
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP
from trencadis.multimodal.pixtral import model as pixtral
from trencadis.multimodal.pixtral.config import PixtralVisionConfig
from trencadis.multimodal.vit.tile_image_processor import get_vision_config, has_processor_settings
from trencadis.multimodal.vit.tile_vision_model import TileVisionModel


class LlavaModel(TileVisionModel):
    """A decoder with CLIP's vision tower."""

    def load_position_table(self, source: WeightSource, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2 + 1, c.hidden))
        return torch.cat([table[:1] + source.take(f"{at}.class_embedding", (c.hidden,)), table[1:]])


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """Builds the model; named in the family's record."""
    if isinstance(config.vision, PixtralVisionConfig):
        return pixtral.make(config, backend)
    known = has_processor_settings(config.path)
    return LlavaModel(
        config, backend, read_settings(config.path, get_vision_config(config).image, PROCESSOR_TYPES) if known else CLIP
    )
