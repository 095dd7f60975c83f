"""Llama-3.2-Vision: Llama's decoder and a vision tower of two stacks."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.mllama.processor import read_normalisation_settings
from trencadis.multimodal.mllama_tower.model import MllamaModel


def make(config: ModelConfig, backend: Backend) -> MllamaModel:
    """Builds the model; named in the family's record."""
    return MllamaModel(config, backend, read_normalisation_settings(config))
