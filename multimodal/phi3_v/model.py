"""Phi-3.5-vision: Phi-3's decoder, CLIP's tower on packed slots, and two constant rows computed by the projector."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend
from trencadis.multimodal.llava.model import LlavaModel
from trencadis.multimodal.phi3_v.processor import load_processor


class Phi3VModel(LlavaModel):
    """A decoder with CLIP's tower over tiles, and the constant rows between them."""

    def load_constant_rows(self, source: WeightSource) -> Tensor:
        """Returns the end of a line and the separator, [2, out_hidden]: the projector's outputs for the stored cell
        values.
        """
        width = self.tower.cell_width
        line, whole = source.take("visual.sub_GN", (1, 1, 1, width)), source.take("visual.glb_GN", (1, 1, width))
        return self.project_cells(source, torch.cat([line.view(1, width), whole.view(1, width)]))


def make(config: ModelConfig, backend: Backend) -> Phi3VModel:
    """Builds the model; named in the family's record."""
    return Phi3VModel(config, backend, load_processor(config, {}))
