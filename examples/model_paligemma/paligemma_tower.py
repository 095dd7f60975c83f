"""PaliGemma's model: the shared decoder, and SigLIP's tower on packed slots."""

from __future__ import annotations

import torch
from paligemma_processor import colours_of
from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.multimodal.tiles.model import TileModel


class PaliGemma(TileModel):
    """``core.models.interface.VisionModel``."""

    def places(self, source: Source, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        table = table + source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([torch.zeros_like(table[:1]), table])  # row 0 is that of a class token


def make(config: ModelConfig, backend: Backend) -> PaliGemma:
    """The factory that the family's record names."""
    return PaliGemma(config, backend, colours_of(config))
