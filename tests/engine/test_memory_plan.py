"""The CPU's memory rule: what it plans, and what it refuses with which advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.cache_plan import ARENA_ROWS, KV_CAP, CacheOptions, block_bytes, plan_cpu, weights_bytes
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig as VisionConfig

TEXT = TextConfig(896, 24, 14, 2, 64, 4864, 151936, 1e-6, 1e6, 32768, True, True, (8, 12, 12))
VISION = VisionConfig(8, 1280, 16, 3420, 896, (3, 7))
MODEL = ModelConfig(Path("m"), "Qwen2_5_VLForConditionalGeneration", TEXT, VISION, "float32", (1,))
GIB = 1 << 30


def test_weights_by_formula_are_close() -> None:
    assert weights_bytes(MODEL, 1) == pytest.approx(684.0e6, rel=0.002)  # the checkpoint of that shape holds 684.0 M


def test_the_least_of_three() -> None:
    requested = CacheOptions(16, 128)
    plenty = plan_cpu(MODEL, requested, 4, 64 * GIB, 16384)
    assert KV_CAP - block_bytes(TEXT, 16, 4) < plenty.num_blocks * block_bytes(TEXT, 16, 4) <= KV_CAP
    tight = plan_cpu(MODEL, requested, 4, 9 * GIB, 16384)
    left = 9 * GIB - weights_bytes(MODEL, 4)
    assert tight.num_blocks == int(0.4 * left) // block_bytes(TEXT, 16, 4)
    few = plan_cpu(MODEL, replace(requested, max_num_seqs=2, max_model_len=1000), 4, 64 * GIB, 16384)
    assert few.num_blocks == 2 * 63 and few.max_model_len == 1000


def test_model_length_is_lowered_only_where_it_was_left_open() -> None:
    requested = CacheOptions(16, 128, kv_bytes=64 << 20)
    plan = plan_cpu(MODEL, requested, 4, 64 * GIB, 16384)
    assert plan.max_model_len == plan.kv_tokens < 32768 and "lowered" in plan.notes[0]
    with pytest.raises(StartupError, match=rf"largest that fits is {plan.kv_tokens}"):
        plan_cpu(MODEL, replace(requested, max_model_len=32768), 4, 64 * GIB, 16384)
    fits = plan_cpu(MODEL, replace(requested, max_model_len=plan.kv_tokens), 4, 64 * GIB, 16384)
    assert fits.max_model_len == plan.kv_tokens


def test_advice_carries_values() -> None:
    with pytest.raises(StartupError, match="largest is 32768"):
        plan_cpu(MODEL, CacheOptions(16, 8, max_model_len=40000), 4, 64 * GIB, 1)
    with pytest.raises(StartupError, match="not enough memory"):
        plan_cpu(MODEL, CacheOptions(16, 8), 4, GIB, 1)
    with pytest.raises(StartupError, match="are free"):
        plan_cpu(MODEL, CacheOptions(16, 8, kv_bytes=70 * GIB), 4, 64 * GIB, 1)
    with pytest.raises(StartupError, match="at least 2"):
        plan_cpu(MODEL, CacheOptions(16, 8, arena_images=1), 4, 64 * GIB, 1)


@given(st.integers(4, 200), st.sampled_from([16, 32, 128]), st.integers(1, 300), st.integers(1, 20_000))
def test_the_pool_holds_one_full_request_and_the_arena_two_images(free: int, size: int, seqs: int, image: int) -> None:
    try:
        plan = plan_cpu(MODEL, CacheOptions(size, seqs), 4, free * GIB, image)
    except StartupError:
        assert free * GIB < weights_bytes(MODEL, 4) + GIB
        return
    assert plan.kv_tokens >= plan.max_model_len and plan.concurrency >= 1
    assert plan.arena_rows - 2 >= max(2 * min(image, plan.max_model_len), ARENA_ROWS)
    assert plan.kv_bytes <= free * GIB
