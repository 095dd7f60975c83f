"""The predicted seconds of a full step, which the supervisor's limit follows, and flags of ``LLM`` given as texts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trencadis import LLM, SamplingParams
from trencadis.core.errors import StartupError
from trencadis.core.process import engine_messages
from trencadis.server.engine.engine_process_link import STALL_FACTOR, STALL_SECONDS, EngineLink

MANY = 2048


def test_a_full_step_stays_far_below_twenty_times_its_prediction(vl_checkpoint: Path) -> None:
    llm = LLM(str(vl_checkpoint), max_num_batched_tokens=str(MANY), kv_cache_memory_bytes="64MiB", dtype="float32")
    assert llm.config.kv_cache_memory_bytes == 64 << 20
    predicted = llm.engine.info().step_seconds
    assert predicted > 0
    started = time.perf_counter()
    llm.generate([[50 + i % 100] * 250 for i in range(8)], SamplingParams(max_tokens=1), use_tqdm=False)
    assert time.perf_counter() - started < 20 * max(predicted, 1.0)


def test_texts_are_checked_like_flags(vl_checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="kv_cache_memory_bytes: 'much' is not a size"):
        LLM(str(vl_checkpoint), kv_cache_memory_bytes="much")


@pytest.mark.parametrize(("predicted", "limit"), [(0.0, STALL_SECONDS), (30.0, STALL_FACTOR * 30)])
def test_the_limit_of_a_step_follows_the_prediction(predicted: float, limit: float) -> None:
    link, reasons = EngineLink.__new__(EngineLink), list[str]()
    link.compile_timeout, link.pinged, link.ponged = 1800.0, 0, 0
    link.kill_engine = reasons.append  # type: ignore[assignment]
    link.info = engine_messages.EngineInfo("cpu", "float32", 1, 1, 1, 1, 1, step_seconds=predicted)
    link.check_step(engine_messages.Pong(1, "running", 1, limit - 1))
    assert not reasons
    link.check_step(engine_messages.Pong(1, "running", 1, limit + 1))
    assert len(reasons) == 1 and f"limit {limit:.0f} s" in reasons[0]
