"""The whole engine on the CPU twin of a card: its plan, its graphs, its answers, and what failures cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from traffic import Traffic

from trencadis.backends.cuda.twin import Faults, TwinRuntime
from trencadis.core.config import EngineConfig
from trencadis.core.engine import Engine

LENGTH = 64
FLAGS: dict[str, Any] = {
    "device": "cuda", "policy": "twin", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks_override": 12, "encoder_cache_images": 2,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
MIB = 1 << 20

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """``make(faults, warmup="skip")``: an engine; ended with the test."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256")
    made: list[Engine] = []

    def create(faults: Faults | None = None, **flags: Any) -> Engine:
        monkeypatch.setattr(TwinRuntime, "standing", faults)
        made.append(Engine.create(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def graphs_of(engine: Engine) -> Any:
    return engine.executor._rank.graphs  # type: ignore[attr-defined]


def runtime_of(engine: Engine) -> TwinRuntime:
    found: TwinRuntime = graphs_of(engine).backend.runtime
    return found


def tokens(engine: Engine, count: int, seed: int = 0, aborts: float = 0.02) -> dict[tuple[str, int], list[int]]:
    """What a run of random requests answers."""
    run = Traffic(engine, seed, count, LENGTH, engine.info().vocab_size, most=8, aborts=aborts)
    run.run()
    return run.tokens


def check_books(engine: Engine) -> None:
    """Rows sum to the device; what they call used is what the device calls used."""
    captures, memory = engine._watch.captures, graphs_of(engine).backend.memory  # type: ignore[union-attr]
    assert captures is not None
    captures.observe()
    rows = dict(captures.ledger.rows())
    assert sum(rows.values()) == memory.total()
    assert memory.total() - memory.free() == memory.total() - rows["margin"] - rows["graph reserve unused"]


def test_every_bucket_is_captured_and_nothing_compiles_after_warmup(make: Make) -> None:
    engine = make()
    graphs, runtime = graphs_of(engine), runtime_of(engine)
    assert len(graphs.captured()) == len(graphs.planned) == 20
    compiled, captured, launched = runtime.compilations(), runtime.counts["capture"], runtime.counts["launch"]
    tokens(engine, 60)
    assert engine.scheduler.preemptions and engine.scheduler.prefix_hits and engine.scheduler.encoder.encoded
    stats = engine.stats()
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert (runtime.compilations(), runtime.counts["capture"], runtime.counts["launch"]) == (
        compiled,
        captured,
        launched,
    )
    check_books(engine)


def test_the_same_tokens_as_the_cpu_at_both_depths(make: Make) -> None:
    want = tokens(make(device="cpu", policy=""), 4, aborts=0)
    for depth in (0, 1):
        assert tokens(make(async_depth=depth), 4, aborts=0) == want


def test_without_graphs_the_same_tokens(make: Make) -> None:
    engine, eager = make(), make(enforce_eager=True)
    assert tokens(engine, 4, seed=3, aborts=0) == tokens(eager, 4, seed=3, aborts=0)
    assert not graphs_of(eager).captured() and not eager.stats().graphs.recompiles
