"""InternVL3: a decoder, and InternViT on packed tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.multimodal.internvl.processor import colours_of
from trencadis.multimodal.tiles.model import TileModel


class InternModel(TileModel):
    """A decoder with InternViT."""

    def places(self, source: Source, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embeddings", (1, c.side**2 + 1, c.hidden))[0]
        bias = source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([table[:1] + source.take(f"{at}.cls_token", (1, 1, c.hidden))[0], table[1:] + bias])


def make(config: ModelConfig, backend: Backend) -> InternModel:
    """The factory that the family's record names."""
    return InternModel(config, backend, colours_of(config.path))
