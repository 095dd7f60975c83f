"""Idefics3: Llama's decoder, and SigLIP on packed tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.multimodal.idefics3.processor import colours_of
from trencadis.multimodal.tiles.model import TileModel


def buckets(side: int) -> Tensor:
    """int64 [side]: the place of each line of a full tile, as transformers finds it in float32.

    It compares i x (1 / side) with multiples of 1 / side, so that rounding may give a line its neighbour's place.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)
    lines = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(torch.clamp(lines, max=1.0 - 1e-6), edges, right=True)


class SplitModel(TileModel):
    """A decoder with SigLIP."""

    def places(self, source: Source, at: str) -> Tensor:
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        lines = buckets(c.side)
        index = (lines[:, None] * c.side + lines[None, :]).reshape(-1).to(table.device)
        patches = table.index_select(0, index) + source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([torch.zeros_like(table[:1]), patches])


def make(config: ModelConfig, backend: Backend) -> SplitModel:
    """The factory that the family's record names."""
    return SplitModel(config, backend, colours_of(config))
