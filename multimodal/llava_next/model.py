"""LLaVA-NeXT: CLIP's tower over tiles, and a constant row that ends each line of a picture."""

from __future__ import annotations

from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.core.layout import RESERVED_ROWS
from trencadis.core.models.interface import Persistent
from trencadis.multimodal.colours import CLIP
from trencadis.multimodal.llava.clip import read_settings
from trencadis.multimodal.llava.model import ClipModel
from trencadis.multimodal.llava_next.family import NEWLINE
from trencadis.multimodal.llava_next.processor import KINDS
from trencadis.multimodal.tiles.processor import has_settings, tower_of


class GridModel(ClipModel):
    """A decoder with CLIP's tower, and the newline row."""

    newline: Tensor  # [hidden]

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        if self.share.starts:
            self.newline = source.take("visual.image_newline", (self.tower.out_hidden,))

    def bind(self, persistent: Persistent) -> None:
        super().bind(persistent)
        if self.share.starts:
            persistent.arena[RESERVED_ROWS + NEWLINE] = self.newline

    def nbytes(self) -> int:
        return super().nbytes() + (self.newline.nbytes if self.share.starts else 0)


def make(config: ModelConfig, backend: Backend) -> GridModel:
    """The factory that the family's record names."""
    known = has_settings(config.path)
    return GridModel(config, backend, read_settings(config.path, tower_of(config).image, KINDS) if known else CLIP)
