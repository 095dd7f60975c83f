"""PaliGemma's model: the shared decoder, and SigLIP's tower on packed slots."""

from __future__ import annotations

from paligemma_processor import colours_of

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import Backend
from trencadis.multimodal.vit.tile_vision_model import TileVisionModel


def make(config: ModelConfig, backend: Backend) -> TileVisionModel:
    """The factory that the family's record names. SigLIP is what ``TileVisionModel`` is without a family's changes."""
    return TileVisionModel(config, backend, colours_of(config))
