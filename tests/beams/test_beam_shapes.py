"""Beams and chosen ids among other requests on devices with planned shapes: nothing compiles after warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.requests import Traffic
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig

LENGTH = 64
COMMON: dict[str, Any] = {
    "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
    "num_gpu_blocks_override": 14, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "twin": {"device": "cuda", "policy": "twin", "encoder_cache_images": 2},
    "hpu": {"device": "hpu"},
}

Make = Callable[[str], Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """``make("hpu")``: an engine after its warm-up; ended with the test."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256")
    monkeypatch.setattr(TwinRuntime, "standing", None)
    made: list[Engine] = []

    def create(name: str) -> Engine:
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**COMMON, **DEVICES[name]})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def mixed(engine: Engine, count: int) -> None:
    """40 % beams and chosen ids; no compilation, no shape outside the plan, nothing left behind."""
    run = Traffic(engine, 5, count, LENGTH, engine.info().vocab_size, most=8, extras=0.4)
    run.run()
    stats = engine.stats()
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert all(use.planned for use in stats.buckets) and not any(use.miss for use in stats.buckets)
    engine.scheduler.check()
    assert engine.scheduler.pool.used == 0 and len(run.ended) >= 0.8 * count


def test_beams_bring_no_shape_of_their_own(make: Make) -> None:
    mixed(make("twin"), 15)


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_a_thousand_mixed_requests_compile_nothing(name: str, make: Make) -> None:
    engine = make(name)
    mixed(engine, 1000)
    print(f"{name}: 1000 requests, {engine.scheduler.totals.preemptions} preemptions")
