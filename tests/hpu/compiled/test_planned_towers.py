"""A start in compile mode of every family that sees compiles what the plan says, with and without adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vision import vision_checkpoints
from tests.vision.all_families.family_list import WRITERS
from trencadis import LLM
from trencadis.backends.hpu.attention.vision_tower_attention import prepare_segments
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.emulated_bridge import EmulatedRuntime
from trencadis.backends.hpu.shape_policy import CompiledParts, count_compiled
from trencadis.core.device.backend import Segments
from trencadis.core.engine.startup_checks import planned_models

pytestmark = pytest.mark.part("gaudi")

FAMILIES: dict[str, Callable[[Path], Path]] = {
    **WRITERS,
    "qwen3_5": vision_checkpoints.qwen3_5,
    "gemma4": vision_checkpoints.gemma4,
    "gemma4_unified": partial(vision_checkpoints.gemma4, unified=True),
    "glm4v": vision_checkpoints.glm4v,
    "glm_ocr": partial(vision_checkpoints.glm4v, name="GlmOcr"),
    "lfm2_vl": vision_checkpoints.lfm2_vl,
}
QUICK = ("qwen3_vl",)
ADAPTED = ("qwen2_5_vl", "qwen3_vl", "internvl", "mistral3")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: FAMILIES[family](tmp_path_factory.mktemp(family)))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[CompiledParts, CompiledParts]]:
    """``start(path, **flags)``: what a start on a card without values compiles, and what its plan had said."""
    for name, value in {"TRENCADIS_HPU_EMULATOR": "1", "TRENCADIS_HPU_EMULATOR_KIND": "meta",
                        "PT_HPU_LAZY_MODE": "0", "TRENCADIS_CACHE": str(tmp_path)}.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def run(path: Path, **flags: Any) -> tuple[CompiledParts, CompiledParts]:
        llm = LLM(
            str(path), device="hpu", max_model_len=1024, max_num_seqs=2, max_num_batched_tokens=512, block_size=64,
            **flags,
        )  # fmt: skip
        try:
            executor: Any = llm.engine.executor
            backend: HpuBackend = executor._rank.backend
            counted = [
                count_compiled(one) for one in planned_models(executor._rank.model.config, executor._rank.plan, None)
            ]
            regions, card = backend.hpu_ops.regions, EmulatedRuntime.device
            assert regions is not None and card is not None and not backend.graph_breaks()
            return CompiledParts(len(regions.known), card.clock.flavours), counted[0]
        finally:
            llm.close()

    return run


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES])
def test_a_start_compiles_what_the_plan_says(family: str, written: Any, start: Any) -> None:
    """Families with one kind of layers in their tower, with several projectors, with none, with layers that see."""
    real, planned = start(written(family))
    assert real == planned


@pytest.mark.parametrize("windows", [1, 3])
def test_masks_of_images_are_no_views(windows: int) -> None:
    """Of one window, too: a view would leave the compiled function, and bring its whole storage into each layer."""
    first = torch.arange(windows, dtype=torch.int32)
    made = prepare_segments(Segments(first, first + 60, first))
    results = [made.visible, made.image, made.key, made.solid]
    assert not any(t is None or t._is_view() or not t.is_contiguous() for t in results)


@pytest.mark.long
@pytest.mark.parametrize("family", ADAPTED)
def test_with_adapters_too(family: str, written: Any, start: Any) -> None:
    real, planned = start(written(family), enable_lora=True, max_loras=2)
    assert real == planned
