"""The SmolVLM2 family. Checkpoints of the first SmolVLM have Idefics3's model_type."""

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
