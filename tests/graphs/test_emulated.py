"""The whole engine on an emulated card: nothing compiles after warm-up, and its failures cost graphs, not answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from traffic import Traffic

from trencadis.core.backend import State
from trencadis.core.config import EngineConfig
from trencadis.core.engine import Engine
from trencadis.core.errors import StartupError

LENGTH = 192
FLAGS: dict[str, Any] = {
    "device": "hpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 128,
    "block_size": 16, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 224 * 224},
}  # fmt: skip

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """``make(faults="oom@capture:2", warmup="skip")``: an engine; ended with the test."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256,512")
    made: list[Engine] = []

    def create(faults: str = "", **flags: Any) -> Engine:
        monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_FAULTS", faults)
        made.append(Engine.create(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def vocab(engine: Engine) -> int:
    return engine.info().vocab_size


def traffic(engine: Engine, count: int, seed: int = 0, **options: Any) -> Traffic:
    run = Traffic(engine, seed, count, LENGTH, vocab(engine), **options)
    run.run()
    return run


def check(engine: Engine, compiled: int = 0) -> None:
    """No compilation that warm-up should have made, no shape outside the plan, books that add up."""
    stats = engine.stats()
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, compiled)
    assert all(use.planned for use in stats.buckets)
    check_books(engine)


def check_books(engine: Engine) -> None:
    plan = engine.executor._rank.graphs, engine._watch.captures  # type: ignore[attr-defined]
    graphs, captures = plan
    captures.observe()
    rows = dict(captures.ledger.rows())
    memory = graphs.backend.memory
    assert sum(rows.values()) == memory.total()
    assert memory.total() - memory.free() == memory.total() - rows["margin"] - rows["graph reserve unused"]


def test_nothing_compiles_after_a_full_warmup(make: Make) -> None:
    engine = make(num_gpu_blocks_override=24, encoder_cache_images=2)
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    assert len(graphs.captured()) == len(graphs.planned) > 30
    traffic(engine, 300)
    assert engine.scheduler.preemptions and engine.scheduler.prefix_hits and engine.scheduler.encoder.encoded
    check(engine)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_nothing_compiles_in_ten_thousand_requests(make: Make, seed: int) -> None:
    engine = make(num_gpu_blocks_override=24 if seed % 2 else 48, encoder_cache_images=2 + seed % 3)
    traffic(engine, 1000, seed + 1)
    check(engine)


def test_the_same_answers_without_graphs_lazily_and_from_a_failing_card(make: Make) -> None:
    wanted = traffic(make(enforce_eager=True, warmup="skip"), 12, 7).tokens
    lazy = make(warmup="skip")
    assert traffic(lazy, 12, 7).tokens == wanted
    stats = lazy.stats()
    assert stats.graphs.recompiles == 0 < stats.graphs.lazy_compiles and stats.plan is not None
    assert {b.state for b in stats.plan.buckets} == {"planned", "captured"}
    check_books(lazy)
    sick = make(faults="oom@capture:3,oom@step:40", warmup="skip")
    assert traffic(sick, 12, 7).tokens == wanted
    check_books(sick)


@pytest.mark.parametrize("k", [5, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2, 12, 20, 30))])
def test_out_of_memory_in_capture_lets_the_start_go_on(make: Make, k: int) -> None:
    engine = make(faults=f"oom@capture:{k}")
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    assert 0 < len(graphs.captured()) < len(graphs.planned)
    assert all(graphs.state(b) >= State.COMPILED for b in graphs.planned)
    plan = engine.info().graphs
    assert plan is not None and sum("out of memory" in b.failed for b in plan.buckets) == 1
    traffic(engine, 5)
    check(engine)


def test_a_tiny_reserve_captures_some_and_says_what_would_hold_the_plan(make: Make) -> None:
    engine = make(graph_reserved_mem=0.00002)
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    assert 0 < len(graphs.captured()) < len(graphs.planned)
    plan = engine.info().graphs
    assert plan is not None and "holds the plan" in plan.advice[0]
    traffic(engine, 10)
    check(engine)


def test_background_warms_between_steps_and_serves_at_once(make: Make) -> None:
    engine = make(warmup="background", warmup_stall=0.3)
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    assert not graphs.captured() and engine.busy()
    traffic(engine, 10)
    while engine.busy():
        engine.step()
    stats = engine.stats()
    assert len(graphs.captured()) == len(graphs.planned) and stats.graphs.recompiles == 0
    assert stats.graphs.warming is not None and stats.graphs.warming.phase == "warm"
    lazy = stats.graphs.lazy_compiles
    traffic(engine, 10, 1)
    check(engine, compiled=lazy)


def test_measured_graphs_are_used_by_the_next_start(make: Make) -> None:
    first = make()
    assert first.info().graphs is not None
    second = make(graph_memory="auto")
    pools = second.info().graphs.pools  # type: ignore[union-attr]
    assert all(spent <= budget for budget, spent, _ in pools.values())
    reserve = dict(second.info().graphs.ledger)["graph reserve unused"]  # type: ignore[union-attr]
    assert reserve < dict(first.info().graphs.ledger)["graph reserve unused"] // 10  # type: ignore[union-attr]


def test_what_cannot_fit_is_refused_before_loading(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trencadis.core.models.registry.build", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(StartupError, match=r"--gpu-memory-utilization 0\.0\d fits"):
        make(gpu_memory_utilization=0.000001)
