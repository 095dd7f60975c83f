"""Qwen2 and Qwen2.5: the shared decoder with biases on q, k and v (``TextConfig.qkv_bias``)."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.models.decoder import Decoder

PREFIXES = {"model.": "", "lm_head.": "lm_head.", "score.": "score.", "": ""}
"""The last entry is for checkpoints of the decoder alone, whose names have no prefix."""


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """Qwen2ForCausalLM."""
    return Decoder(config, backend, PREFIXES)
