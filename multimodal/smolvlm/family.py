"""SmolVLM2 as a family. SmolVLM of the first generation says that it is Idefics3."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.models.family import GENERATE
from trencadis.multimodal.idefics3 import family

FAMILY = replace(
    family.FAMILY,
    name="SmolVLM2",
    model_type="smolvlm",
    architectures={"SmolVLMForConditionalGeneration": GENERATE},
)
