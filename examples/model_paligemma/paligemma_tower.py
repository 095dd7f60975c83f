"""PaliGemma's model: the shared decoder, and SigLIP's tower on packed slots."""

from __future__ import annotations

from paligemma_processor import colours_of

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.tiles.model import TileModel


def make(config: ModelConfig, backend: Backend) -> TileModel:
    """The factory that the family's record names. SigLIP is what ``TileModel`` is without a family's changes."""
    return TileModel(config, backend, colours_of(config))
