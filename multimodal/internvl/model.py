"""InternVL3: a decoder, and InternViT on packed tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend
from trencadis.multimodal.internvl.processor import load_normalisation
from trencadis.multimodal.vit.tile_vision_model import TileVisionModel


class InternVLModel(TileVisionModel):
    """A decoder with InternViT's tower."""

    def load_position_table(self, source: WeightSource, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embeddings", (1, c.side**2 + 1, c.hidden))[0]
        bias = source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([table[:1] + source.take(f"{at}.cls_token", (1, 1, c.hidden))[0], table[1:] + bias])


def make(config: ModelConfig, backend: Backend) -> InternVLModel:
    """Builds the model; named in the family's record."""
    return InternVLModel(config, backend, load_normalisation(config.path))
