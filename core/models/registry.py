"""Finds the model of an architecture by a table of strings, so that only the model in use is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.models.interface import Model
from trencadis.core.models.loader import weights_of

TABLE = {
    "Qwen2_5_VLForConditionalGeneration": "trencadis.multimodal.qwen2_5_vl.model:make",
    "Qwen2ForCausalLM": "trencadis.core.models.qwen2:make",
    "LlamaForCausalLM": "trencadis.core.models.llama:make",
    "Qwen2ForSequenceClassification": "trencadis.core.models.qwen2:make",
    "LlamaForSequenceClassification": "trencadis.core.models.llama:make",
    "Qwen2Model": "trencadis.core.models.qwen2:make",
    "LlamaModel": "trencadis.core.models.llama:make",
}

IMAGES = {"Qwen2_5_VLForConditionalGeneration": "trencadis.multimodal.images.needs:image_needs"}


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """What this model's images may need; ``asked``: ``--mm-processor-kwargs``."""
    target = IMAGES.get(config.architecture)
    if target is None:
        return ImageNeeds()
    module, _, function = target.partition(":")
    found: ImageNeeds = getattr(import_module(module), function)(config.path, asked, alignment)
    return found


def make(config: ModelConfig, backend: Backend) -> Model:
    """The model of a checkpoint, without weights.

    Raises:
        StartupError: no such architecture.
    """
    target = TABLE.get(config.architecture)
    if target is None:
        raise StartupError(f"{config.path} holds {config.architecture}; supported: {', '.join(TABLE)}")
    module, _, factory = target.partition(":")
    made: Callable[[ModelConfig, Backend], Model] = getattr(import_module(module), factory)
    return made(config, backend)


def build(config: ModelConfig, backend: Backend, cfg: EngineConfig | None = None) -> Model:
    """Loads and packs the model of a checkpoint; with ``cfg.load_format`` "dummy" the weights are random.

    Raises:
        StartupError: no such architecture, or weights that are missing, misshaped or unreadable.
    """
    model = make(config, backend)
    dummy = cfg is not None and cfg.load_format == "dummy"
    weights = weights_of(config.path, dummy=dummy, seed=cfg.seed if cfg else 0)
    model.load(weights)
    weights.forget()
    return model
