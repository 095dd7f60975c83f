"""Idefics3: Llama's decoder, and SigLIP on packed tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend
from trencadis.multimodal.idefics3.processor import load_normalisation
from trencadis.multimodal.vit.tile_vision_model import TileVisionModel


def bucketize_positions(side: int) -> Tensor:
    """Returns int64 [side]: the position index of each row of patches in a full tile, computed in float32 like
    transformers.

    It compares i x (1 / side) with multiples of 1 / side, so that rounding may give a row its neighbour's position.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)
    lines = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(torch.clamp(lines, max=1.0 - 1e-6), edges, right=True)


class Idefics3Model(TileVisionModel):
    """A decoder with SigLIP's tower."""

    def load_position_table(self, source: WeightSource, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        lines = bucketize_positions(c.side)
        index = (lines[:, None] * c.side + lines[None, :]).reshape(-1).to(table.device)
        patches = table.index_select(0, index) + source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([torch.zeros_like(table[:1]), patches])


def make(config: ModelConfig, backend: Backend) -> Idefics3Model:
    """Builds the model; named in the family's record."""
    return Idefics3Model(config, backend, load_normalisation(config))
