"""LLaVA-1.5: Llama's decoder, and CLIP's tower on packed slots."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.core.models.decoder import Decoder
from trencadis.multimodal.colours import CLIP
from trencadis.multimodal.lines.config import LineTower
from trencadis.multimodal.llava.clip import read_settings
from trencadis.multimodal.llava.processor import KINDS
from trencadis.multimodal.pixtral import model as pixtral
from trencadis.multimodal.tiles.model import TileModel
from trencadis.multimodal.tiles.processor import has_settings, tower_of


class ClipModel(TileModel):
    """A decoder with CLIP's tower."""

    def places(self, source: Source, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2 + 1, c.hidden))
        return torch.cat([table[:1] + source.take(f"{at}.class_embedding", (c.hidden,)), table[1:]])


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """The factory that the family's record names."""
    if isinstance(config.vision, LineTower):
        return pixtral.make(config, backend)
    known = has_settings(config.path)
    return ClipModel(config, backend, read_settings(config.path, tower_of(config).image, KINDS) if known else CLIP)
