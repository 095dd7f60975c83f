"""Mistral's decoder with Pixtral's tower."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.pixtral.processor import load_normalisation
from trencadis.multimodal.pixtral_tower.model import PixtralModel


def make(config: ModelConfig, backend: Backend) -> PixtralModel:
    """Builds the model; named in the records of its families."""
    return PixtralModel(config, backend, load_normalisation(config))
