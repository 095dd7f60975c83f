"""Llama-3.2-Vision: Llama's decoder and a tower of two stacks."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.mllama.processor import settings
from trencadis.multimodal.stacks.model import TwoStackModel


def make(config: ModelConfig, backend: Backend) -> TwoStackModel:
    """The factory that the family's record names."""
    return TwoStackModel(config, backend, settings(config))
