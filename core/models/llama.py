"""Llama: biases and scaled frequencies only if the checkpoint says so (``TextConfig.rope_scaling``)."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.models.decoder import Decoder

PREFIXES = {"model.": "", "lm_head.": "lm_head.", "score.": "score.", "": ""}
"""The last entry is for checkpoints of the decoder alone, whose names have no prefix."""


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """LlamaForCausalLM."""
    return Decoder(config, backend, PREFIXES)
