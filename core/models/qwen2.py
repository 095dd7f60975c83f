"""Qwen2 and Qwen2.5: biases on q, k and v (``TextConfig.qkv_bias``), the rest is the shared decoder."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.models.decoder import Decoder

PREFIXES = {"model.": "", "lm_head.": "lm_head."}


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """Qwen2ForCausalLM."""
    return Decoder(config, backend, PREFIXES)
