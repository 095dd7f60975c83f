"""`benchmarks.vision` has every family that sees."""

from __future__ import annotations

from benchmarks.vision.vision_models import KINDS
from trencadis.core.checkpoint.model_registry import TABLE, family_of

COMPOSED = "Phi3VForCausalLM"
"""transformers has no such model: ``benchmarks.vision.phi3_v_reference``."""

UNTIMED = ("Gemma4Unified", "Glm46V", "GlmOcr", "Lfm2Vl", "Qwen3_5Moe")
UNMEASURED = {f"{name}ForConditionalGeneration" for name in UNTIMED}
"""Families whose speed beside transformers is not measured: a relative with the same tower, or nearly so, is."""


def test_every_family_that_sees_is_measured() -> None:
    served = {name for name in TABLE if family_of(name).vision is not None}
    assert served - UNMEASURED == {f"{kind.name}ForConditionalGeneration" for kind in KINDS.values()} | {COMPOSED}
    assert served >= UNMEASURED
