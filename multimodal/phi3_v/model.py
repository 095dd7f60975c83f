"""Phi-3.5-vision: Phi-3's decoder, CLIP's tower on packed slots, and two constant rows that pass the projector."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.multimodal.llava.model import ClipModel
from trencadis.multimodal.phi3_v.processor import settings


class CropModel(ClipModel):
    """A decoder with CLIP's tower over tiles, and the rows between them."""

    def constant_rows(self, source: Source) -> Tensor:
        """The end of a line and the separator, as the projector makes them of a cell's values."""
        width = self.tower.cell_width
        line, whole = source.take("visual.sub_GN", (1, 1, 1, width)), source.take("visual.glb_GN", (1, 1, width))
        return self.projected(source, torch.cat([line.view(1, width), whole.view(1, width)]))


def make(config: ModelConfig, backend: Backend) -> CropModel:
    """The factory that the family's record names."""
    return CropModel(config, backend, settings(config, {}))
