"""Mistral's decoder with Pixtral's tower."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.lines.model import LineModel
from trencadis.multimodal.pixtral.processor import colours_of


def make(config: ModelConfig, backend: Backend) -> LineModel:
    """The factory that records of its families name."""
    return LineModel(config, backend, colours_of(config))
