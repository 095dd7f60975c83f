"""On a real card: replays equal runs bit for bit, nothing compiles after warm-up, and the books are right. In bfloat16,
which serving takes: products by tensor cores and dependent launches are in no graph of float32.

Without a card the twin stands for it, in the long runs: that shows that the tests themselves work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.traffic.requests import Traffic
from trencadis.core.buckets import Stage
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig

CARD = torch.cuda.is_available()
pytestmark = [] if CARD else [pytest.mark.long]

LENGTH = 256
FLAGS: dict[str, Any] = {
    "device": "cuda", "policy": "" if CARD else "twin", "dtype": "bfloat16", "max_model_len": LENGTH,
    "max_num_seqs": 8, "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 8 << 20, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 224 * 224},
}  # fmt: skip

Make = Callable[..., Engine]


@pytest.fixture
def make(vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """``make(**flags)``: an engine on card 0; ended with the test."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    made: list[Engine] = []

    def create(**flags: Any) -> Engine:
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def rank(engine: Engine) -> Any:
    return engine.executor._rank  # type: ignore[attr-defined]


def persistent(engine: Engine) -> list[Tensor]:
    """Everything that launches leave their results in."""
    p = rank(engine).model.persistent
    return [t for t in tree_flatten((p.kv, p.hidden, p.arena, p.state))[0] if isinstance(t, Tensor)]


def check_replays(engine: Engine) -> None:
    """Every captured bucket, on random memory and its padding: outputs, hidden rows, caches and sampler state."""
    graphs = rank(engine).graphs
    assert graphs.list_captured()
    for bucket in graphs.list_captured():
        program, runtime = graphs.program(bucket), graphs.backend.runtime
        for i, t in enumerate(persistent(engine)):
            if t.is_floating_point():
                t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(i)).to(t))
        before, seen = [t.clone() for t in persistent(engine)], []
        for launch in (program.run, program.replay):
            for t, kept in zip(persistent(engine), before, strict=True):
                t.copy_(kept)  # counts are added to
            runtime.synchronize()
            program.fill(None)
            out = [t for t in tree_flatten(launch())[0] if isinstance(t, Tensor)]
            runtime.synchronize()
            seen.append([t.clone() for t in (*out, *persistent(engine))])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), bucket


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_replay_equals_a_run_bit_for_bit(make: Make, dtype: str) -> None:
    check_replays(make(dtype=dtype))


def test_graphs_survive_the_end_of_others(make: Make) -> None:
    """Half of them are given up, and whatever came back is written over; what is left still replays what it ran."""
    engine = make()
    graphs = rank(engine).graphs
    for _ in range(len(graphs.list_captured()) // 2):
        graphs.release_least_used()
    scribble = [torch.full((8 << 20,), float("nan"), device=graphs.backend.device) for _ in range(8)]
    check_replays(engine)
    assert all(bool(t.isnan().all()) for t in scribble)


@pytest.mark.parametrize("count", [100, *([pytest.param(10_000, marks=pytest.mark.long)] if CARD else [])])
def test_nothing_is_compiled_or_captured_after_warmup(make: Make, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    engine = make()
    graphs = rank(engine).graphs
    compiled = graphs.backend.compilations()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a capture after warm-up")

    monkeypatch.setattr(type(graphs.backend.runtime), "capture", refuse)
    Traffic(engine, 1, count, LENGTH, engine.info().vocab_size).run()
    stats = engine.stats()
    assert graphs.backend.compilations() == compiled
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert all(use.planned for use in stats.buckets)


@pytest.mark.skipif(not CARD, reason="no NVIDIA card")
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_ledger_is_within_a_hundredth_of_the_card(make: Make, conf: str) -> None:
    if conf:
        torch.cuda.memory._set_allocator_settings(conf)
    engine = make()
    Traffic(engine, 2, 50, LENGTH, engine.info().vocab_size).run()
    captures = engine._watch.captures  # type: ignore[union-attr]
    assert captures is not None
    torch.cuda.synchronize()
    rows = dict(captures.ledger.rows())
    free, total = torch.cuda.mem_get_info()
    said = total - rows["margin"] - rows["graph reserve unused"]
    assert sum(rows.values()) == total and abs(said - (total - free)) <= total / 100
    if conf:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_graphs_take_what_was_predicted(make: Make) -> None:
    """Within a tenth or 64 MiB, which is what the allocator's segments round a small model's graphs by."""
    captures = make()._watch.captures  # type: ignore[union-attr]
    assert captures is not None
    took = sum(captures.costs.values())
    requested = {s: [captures.by_bucket[b] for b in captures.costs if b.stage is s] for s in Stage}
    want = sum(sum(p.own for p in ps) + max(p.workspace for p in ps) for ps in requested.values() if ps)
    print(f"graphs: predicted {want}, taken {took}")
    assert abs(took - want) <= max(want / 10, 64 << 20)


@pytest.mark.parametrize("depth", [0, 1])
def test_graphs_change_no_token(make: Make, depth: int) -> None:
    def tokens(engine: Engine) -> dict[tuple[str, int], list[int]]:
        run = Traffic(engine, 3, 40, LENGTH, engine.info().vocab_size, aborts=0)
        run.run()
        return run.tokens

    assert tokens(make(async_depth=depth)) == tokens(make(async_depth=0, enforce_eager=True))
