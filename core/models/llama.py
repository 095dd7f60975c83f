"""Llama: biases and scaled frequencies only if the checkpoint says so (``TextConfig.rope_scaling``)."""

from __future__ import annotations

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.models.decoder import Decoder

PREFIXES = {"model.": "", "lm_head.": "lm_head."}


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """LlamaForCausalLM."""
    return Decoder(config, backend, PREFIXES)
