"""Finds the family of an architecture by a table of strings, so that only the family in use is imported. Torch-free.

Other packages may add families with entry points of the group ``trencadis.models``, whose name is the architecture and
whose object is a ``Family``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from trencadis.core.checkpoint.family import TOWER, Family
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.core.renamed_plugin_api_error_hints import find_successors
from trencadis.core.vision_config import SharedMatrix

log = logging.getLogger("trencadis.engine")

GROUP = "trencadis.models"
"""Entry-point group under which an installed package offers a ``Family`` for each architecture name."""

OTHER_LAYOUTS = {"InternVLChatModel": "take the repository of the same model whose name ends in -HF"}
"""Architecture of a layout that is not read -> where the same model is found in one that is."""

_TEXT = "trencadis.core.family_configs"
TABLE = {
    "Qwen2_5_VLForConditionalGeneration": "trencadis.multimodal.qwen2_5_vl.family:FAMILY",
    "Qwen2VLForConditionalGeneration": "trencadis.multimodal.qwen2_vl.family:FAMILY",
    "Qwen3VLForConditionalGeneration": "trencadis.multimodal.qwen3_vl.family:DENSE",
    "Qwen3VLMoeForConditionalGeneration": "trencadis.multimodal.qwen3_vl.family:EXPERTS",
    "Qwen3_5ForConditionalGeneration": "trencadis.multimodal.qwen3_vl.family:QWEN3_5",
    "Qwen3_5MoeForConditionalGeneration": "trencadis.multimodal.qwen3_vl.family:QWEN3_5_MOE",
    "LlavaForConditionalGeneration": "trencadis.multimodal.llava.family:FAMILY",
    "LlavaNextForConditionalGeneration": "trencadis.multimodal.llava_next.family:FAMILY",
    "Gemma3ForConditionalGeneration": "trencadis.multimodal.gemma3.family:FAMILY",
    "Gemma4ForConditionalGeneration": "trencadis.multimodal.gemma4.family:FAMILY",
    "Gemma4UnifiedForConditionalGeneration": "trencadis.multimodal.gemma4.family:UNIFIED",
    "InternVLForConditionalGeneration": "trencadis.multimodal.internvl.family:FAMILY",
    "Idefics3ForConditionalGeneration": "trencadis.multimodal.idefics3.family:FAMILY",
    "Mistral3ForConditionalGeneration": "trencadis.multimodal.pixtral.family:FAMILY",
    "MiniCPMV4_6ForConditionalGeneration": "trencadis.multimodal.minicpmv4_6.family:FAMILY",
    "Lfm2VlForConditionalGeneration": "trencadis.multimodal.lfm2_vl.family:FAMILY",
    "MllamaForConditionalGeneration": "trencadis.multimodal.mllama.family:FAMILY",
    "Glm4vForConditionalGeneration": "trencadis.multimodal.glm4v.family:FAMILY",
    "Glm46VForConditionalGeneration": "trencadis.multimodal.glm4v.family:FLASH",
    "GlmOcrForConditionalGeneration": "trencadis.multimodal.glm4v.family:OCR",
    "Phi3VForCausalLM": "trencadis.multimodal.phi3_v.family:FAMILY",
    "SmolVLMForConditionalGeneration": "trencadis.multimodal.idefics3.family:SMOLVLM",
    "Gemma3ForCausalLM": f"{_TEXT}.gemma3:FAMILY",
    "Gemma3TextForSequenceClassification": f"{_TEXT}.gemma3:FAMILY",
    "Gemma3TextModel": f"{_TEXT}.gemma3:FAMILY",
    "Gemma4ForCausalLM": f"{_TEXT}.gemma4:FAMILY",
    "Gemma4TextModel": f"{_TEXT}.gemma4:FAMILY",
    "Gemma4UnifiedForCausalLM": f"{_TEXT}.gemma4:UNIFIED",
    "Gemma4UnifiedTextModel": f"{_TEXT}.gemma4:UNIFIED",
    "BertForSequenceClassification": f"{_TEXT}.bert:FAMILY",
    "BertModel": f"{_TEXT}.bert:FAMILY",
    "Glm4ForCausalLM": f"{_TEXT}.glm4:FAMILY",
    "Glm4ForSequenceClassification": f"{_TEXT}.glm4:FAMILY",
    "Glm4Model": f"{_TEXT}.glm4:FAMILY",
    "GptOssForCausalLM": f"{_TEXT}.gpt_oss:FAMILY",
    "GptOssForSequenceClassification": f"{_TEXT}.gpt_oss:FAMILY",
    "GptOssModel": f"{_TEXT}.gpt_oss:FAMILY",
    "GPT2LMHeadModel": f"{_TEXT}.gpt2:FAMILY",
    "GPT2Model": f"{_TEXT}.gpt2:FAMILY",
    "GraniteMoeHybridForCausalLM": f"{_TEXT}.granite_hybrid:FAMILY",
    "GraniteMoeHybridModel": f"{_TEXT}.granite_hybrid:FAMILY",
    "GraniteForCausalLM": f"{_TEXT}.llama:GRANITE",
    "GraniteModel": f"{_TEXT}.llama:GRANITE",
    "Lfm2ForCausalLM": f"{_TEXT}.lfm2:FAMILY",
    "Lfm2Model": f"{_TEXT}.lfm2:FAMILY",
    "LlamaForCausalLM": f"{_TEXT}.llama:FAMILY",
    "LlamaForSequenceClassification": f"{_TEXT}.llama:FAMILY",
    "LlamaModel": f"{_TEXT}.llama:FAMILY",
    "Ministral3ForCausalLM": f"{_TEXT}.mistral:MINISTRAL3",
    "Ministral3ForSequenceClassification": f"{_TEXT}.mistral:MINISTRAL3",
    "Ministral3Model": f"{_TEXT}.mistral:MINISTRAL3",
    "MistralForCausalLM": f"{_TEXT}.mistral:FAMILY",
    "MistralForSequenceClassification": f"{_TEXT}.mistral:FAMILY",
    "MistralModel": f"{_TEXT}.mistral:FAMILY",
    "MixtralForCausalLM": f"{_TEXT}.mistral:MIXTRAL",
    "MixtralForSequenceClassification": f"{_TEXT}.mistral:MIXTRAL",
    "MixtralModel": f"{_TEXT}.mistral:MIXTRAL",
    "Olmo2ForCausalLM": f"{_TEXT}.olmo2:FAMILY",
    "Olmo2ForSequenceClassification": f"{_TEXT}.olmo2:FAMILY",
    "Olmo2Model": f"{_TEXT}.olmo2:FAMILY",
    "Olmo3ForCausalLM": f"{_TEXT}.olmo2:OLMO3",
    "Olmo3ForSequenceClassification": f"{_TEXT}.olmo2:OLMO3",
    "Olmo3Model": f"{_TEXT}.olmo2:OLMO3",
    "NemotronHForCausalLM": f"{_TEXT}.nemotron_h:FAMILY",
    "NemotronHModel": f"{_TEXT}.nemotron_h:FAMILY",
    "OPTForCausalLM": f"{_TEXT}.opt:FAMILY",
    "OPTModel": f"{_TEXT}.opt:FAMILY",
    "Phi3ForCausalLM": f"{_TEXT}.phi3:FAMILY",
    "Phi3ForSequenceClassification": f"{_TEXT}.phi3:FAMILY",
    "Phi3Model": f"{_TEXT}.phi3:FAMILY",
    "Qwen2ForCausalLM": f"{_TEXT}.qwen2:FAMILY",
    "Qwen2ForProcessRewardModel": f"{_TEXT}.qwen2:FAMILY",
    "Qwen2ForRewardModel": f"{_TEXT}.qwen2:FAMILY",
    "Qwen2ForSequenceClassification": f"{_TEXT}.qwen2:FAMILY",
    "Qwen2Model": f"{_TEXT}.qwen2:FAMILY",
    "Qwen2MoeForCausalLM": f"{_TEXT}.qwen2:QWEN2_MOE",
    "Qwen2MoeForSequenceClassification": f"{_TEXT}.qwen2:QWEN2_MOE",
    "Qwen2MoeModel": f"{_TEXT}.qwen2:QWEN2_MOE",
    "Qwen3ForCausalLM": f"{_TEXT}.qwen3:FAMILY",
    "Qwen3ForSequenceClassification": f"{_TEXT}.qwen3:FAMILY",
    "Qwen3Model": f"{_TEXT}.qwen3:FAMILY",
    "Qwen3MoeForCausalLM": f"{_TEXT}.qwen3:QWEN3_MOE",
    "Qwen3MoeForSequenceClassification": f"{_TEXT}.qwen3:QWEN3_MOE",
    "Qwen3MoeModel": f"{_TEXT}.qwen3:QWEN3_MOE",
    "Qwen3NextForCausalLM": f"{_TEXT}.qwen3_5:QWEN3_NEXT",
    "Qwen3NextModel": f"{_TEXT}.qwen3_5:QWEN3_NEXT",
    "Qwen3_5MoeForCausalLM": f"{_TEXT}.qwen3_5:QWEN3_5_MOE",
    "Qwen3_5MoeTextModel": f"{_TEXT}.qwen3_5:QWEN3_5_MOE",
    "Qwen3_5ForCausalLM": f"{_TEXT}.qwen3_5:FAMILY",
    "Qwen3_5TextModel": f"{_TEXT}.qwen3_5:FAMILY",
    "SeedOssForCausalLM": f"{_TEXT}.llama:SEED_OSS",
    "SeedOssForSequenceClassification": f"{_TEXT}.llama:SEED_OSS",
    "SeedOssModel": f"{_TEXT}.llama:SEED_OSS",
    "SmolLM3ForCausalLM": f"{_TEXT}.llama:SMOLLM3",
    "SmolLM3ForSequenceClassification": f"{_TEXT}.llama:SMOLLM3",
    "SmolLM3Model": f"{_TEXT}.llama:SMOLLM3",
    "XLMRobertaForSequenceClassification": f"{_TEXT}.bert:XLM_ROBERTA",
    "XLMRobertaModel": f"{_TEXT}.bert:XLM_ROBERTA",
}
"""Architecture -> ``module:record`` of the built-in families."""


def import_object(target: str) -> Any:
    """Imports the object that ``module:name`` or ``module:name.attribute`` refers to."""
    module, _, name = target.partition(":")
    return attrgetter(name)(import_module(module))


@cache
def installed_families() -> Mapping[str, EntryPoint]:
    """Returns the architectures that other packages offer.

    Raises:
        StartupError: a package claims a built-in name, or two claim the same one.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        taken = TABLE.get(point.name) or (found[point.name].value if point.name in found else "")
        if taken and taken != point.value:
            raise StartupError(f"{source(point)} claims {point.name}, which is {taken}'s; uninstall one of them")
        found[point.name] = point
    return found


PLAIN_DECODER = "LlamaForCausalLM"
"""The architecture whose layers have no variation; heads that draft have one such layer."""


def source(point: EntryPoint) -> str:
    """Returns the package of an entry point, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def architectures() -> list[str]:
    """Returns every supported architecture: the built-in ones, then those of installed packages."""
    return [*TABLE, *(name for name in installed_families() if name not in TABLE)]


@cache
def family_of(architecture: str) -> Family:
    """Returns the family of an architecture.

    Raises:
        StartupError: there is none, or the package that offers it cannot be imported; one line.
    """
    if architecture in TABLE:
        built: Family = import_object(TABLE[architecture])
        return built
    point = installed_families().get(architecture)
    if point is None:
        raise StartupError(f"no family serves {architecture[:80]}; supported: {', '.join(architectures())}")
    try:
        family = point.load()
    except Exception as error:  # a foreign package may raise anything while it is imported
        line = " ".join(str(error).split())[:160]
        failed = f"{source(point)} offers {architecture} and fails: {type(error).__name__}: {line}"
        raise StartupError(failed + find_successors(error)) from None
    if not isinstance(family, Family) or architecture not in family.architectures:
        raise StartupError(f"{source(point)}: {point.value} is no family with {architecture}")
    return family


def adapted_tower(config: ModelConfig, ranks: int = 1, unit: int = 1) -> Iterator[SharedMatrix]:
    """Yields the matrices of the vision tower whose LoRA adapters can be kept beside the model.

    ``ranks``, ``unit``: as in ``VisionConfig.matrices``.
    """
    v = config.vision
    if v is not None and TOWER in family_of(config.architecture).adapters:
        yield from (one for one in v.matrices(ranks, unit) if not one.name.startswith(v.without_adapters))


def family_options(architecture: str) -> dict[str, str]:
    """Returns the family's defaults for device options, "1" or "0", which are passed to the backend.

    Without a default of the family, softmax uses the backend's dtype, as in vLLM's plug-ins.
    """
    defaults = {"fp32_softmax": False, "block_adjustment": True, **family_of(architecture).defaults}
    return {name: "1" if on else "0" for name, on in defaults.items()}


def image_needs(config: ModelConfig, asked: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns the limits of this model's images; ``asked``: ``--mm-processor-kwargs``."""
    vision = family_of(config.architecture).vision
    if vision is None:
        return ImageNeeds()
    if alignment != "pad" and not vision.windows:
        raise StartupError(f"--image-alignment {alignment}: the vision tower of {config.name} has no windows; use pad")
    found: ImageNeeds = import_object(vision.needs)(config, asked, alignment)
    return found


def image_sizes(config: ModelConfig | None, asked: JsonMapping, alignment: str = "pad") -> Callable[..., Any]:
    """Returns a function of an image's sizes: (height, width) -> ``multimodal.processor_interface.ImageGeometry``.

    Without a multimodal model, it is that of the first multimodal family.
    """
    if config is not None and (vision := family_of(config.architecture).vision) is not None:
        made: Callable[..., Any] = import_object(vision.sizes)(config, asked, alignment)
        return made
    first = next(found for name in TABLE if (found := family_of(name).vision) is not None)
    made = import_object(first.sizes)(None, asked, alignment)
    return made


def image_processor(config: ModelConfig, asked: JsonMapping, alignment: str = "pad") -> Any:
    """Creates the ``multimodal.processor_interface.Processor`` of a multimodal checkpoint.

    Raises:
        StartupError: settings are not implemented, or ``asked`` has unknown keys.
    """
    vision = family_of(config.architecture).vision
    assert vision is not None
    if alignment != "pad" and not vision.windows:
        raise StartupError(f"--image-alignment {alignment}: the vision tower of {config.name} has no windows; use pad")
    return import_object(vision.processor)(config, asked, alignment)
