"""LLaVA-NeXT: CLIP's tower over tiles, and a constant row that ends each line of a picture."""

from __future__ import annotations

from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.multimodal.colours import CLIP
from trencadis.multimodal.llava.clip import read_settings
from trencadis.multimodal.llava.model import ClipModel
from trencadis.multimodal.llava_next.processor import KINDS
from trencadis.multimodal.tiles.processor import has_settings, tower_of


class GridModel(ClipModel):
    """A decoder with CLIP's tower, and the newline row."""

    def constant_rows(self, source: Source) -> Tensor:
        return source.take("visual.image_newline", (self.tower.out_hidden,))[None]


def make(config: ModelConfig, backend: Backend) -> GridModel:
    """The factory that the family's record names."""
    known = has_settings(config.path)
    return GridModel(config, backend, read_settings(config.path, tower_of(config).image, KINDS) if known else CLIP)
