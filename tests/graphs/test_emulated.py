"""The whole engine on an emulated card: nothing compiles after warm-up, and its failures cost graphs, not answers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.requests import Traffic
from trencadis.backends.hpu.emulator.emulated_bridge import EmulatedRuntime
from trencadis.backends.hpu.emulator.injected_faults import parse
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import ProgramState
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_profile import write_profile
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES
from trencadis.core.shapes.shape_need_histogram import NeedHistogram
from trencadis.server.plan.plan_command import make_plan

LENGTH = 192
FLAGS: dict[str, Any] = {
    "device": "hpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 128,
    "block_size": 16, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 224 * 224},
}  # fmt: skip

SMALL: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False,
    "num_gpu_blocks_override": 64,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
"""A plan of a dozen buckets over all stages."""

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """``make(faults="oom@capture:2", warmup="skip")``: an engine; ended with the test. ``kind="meta"``: no values."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256,512")
    made: list[Engine] = []

    def create(faults: str = "", kind: str = "compute", **flags: Any) -> Engine:
        monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_FAULTS", faults)
        monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_KIND", kind)
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
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
    assert len(graphs.list_captured()) == len(graphs.planned) > 30
    traffic(engine, 80)
    totals = engine.scheduler.totals
    assert totals.preemptions and totals.prefix_hits and totals.images_encoded
    check(engine)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_nothing_compiles_in_ten_thousand_requests(make: Make, seed: int) -> None:
    engine = make(num_gpu_blocks_override=24 if seed % 2 else 48, encoder_cache_images=2 + seed % 3)
    traffic(engine, 1000, seed + 1)
    check(engine)


def small(engine: Engine, seed: int, count: int = 2) -> dict[tuple[str, int], list[int]]:
    """Tokens of a few requests, texts and images, that fit the small plan."""
    run = Traffic(engine, seed, count, SMALL["max_model_len"], vocab(engine), most=8, aborts=0)
    run.run()
    return run.tokens


@pytest.fixture(scope="module")
def right(vl_checkpoint: Path) -> Iterator[Callable[..., dict[tuple[str, int], list[int]]]]:
    """``right(seed, count)``: the CPU's tokens of the same requests."""
    config = EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **SMALL, "device": "cpu"})
    engine = create_engine(config)
    yield lambda seed, count=2: small(engine, seed, count)
    engine.close()


def inject(faults: str) -> None:
    """Faults of the card from now on."""
    assert EmulatedRuntime.device is not None
    returned = EmulatedRuntime.device.faults.returned
    EmulatedRuntime.device.faults = parse(faults)
    EmulatedRuntime.device.faults.returned = returned


Right = Callable[..., dict[tuple[str, int], list[int]]]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_out_of_memory_at_a_capture(make: Make, right: Right, every: int) -> None:
    """The start goes on, the bucket runs compiled, the books add up, the answers are the CPU's."""
    count, k, lost = 14, 1, set()
    while k <= count:
        engine = make(faults=f"oom@capture:{k}", **SMALL)
        count = len(engine.executor._rank.plan.buckets)  # type: ignore[attr-defined]
        graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
        assert all(graphs.state(b) >= ProgramState.COMPILED for b in graphs.planned)
        plan = engine.info().graphs
        assert plan is not None
        (name,) = {b.name for b in plan.buckets if "Allocation failed" in b.failed}
        lost.add(name)
        assert small(engine, k) == right(k)
        check(engine)
        k += every
    assert count >= 10 and len(lost) == -(-count // every)


@pytest.mark.parametrize(("returned", "every"), [(0, 3), (1, 2), pytest.param(1, 1, marks=pytest.mark.long)])
def test_out_of_memory_at_every_step(make: Make, right: Right, returned: int, every: int) -> None:
    """One graph is given up, whether anything of it comes back or not, and the launch is run again."""
    engine = make(faults=f"return:{returned}", **SMALL)
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    met = 0
    for k in range(1, 14, every):
        if not graphs.list_captured():
            engine = make(faults=f"return:{returned}", **SMALL)
            graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
        held = len(graphs.list_captured())
        inject(f"oom@step:{k}")
        assert small(engine, k) == right(k)
        met += held - len(graphs.list_captured())
        assert held - len(graphs.list_captured()) == (EmulatedRuntime.device.faults.counts["step"] >= k)  # type: ignore[union-attr]
        check(engine)
    assert met >= {1: 8, 2: 4, 3: 2}[every]


def test_lazily_with_and_without_faults(make: Make, right: Right) -> None:
    wanted = right(7, 4)
    assert small(make(enforce_eager=True, warmup="skip", **SMALL), 7, 4) == wanted
    lazy = make(warmup="skip", **SMALL)
    assert small(lazy, 7, 4) == wanted
    stats = lazy.stats()
    assert stats.graphs.recompiles == 0 < stats.graphs.lazy_compiles and stats.plan is not None
    assert {b.state for b in stats.plan.buckets} == {"planned", "captured"}
    assert sum(use.miss == "skip" for use in stats.buckets) == stats.graphs.lazy_compiles
    assert {use.miss for use in stats.buckets} == {"skip", ""}
    check_books(lazy)
    sick = make(faults="oom@capture:1,oom@step:14", warmup="skip", **SMALL)
    assert small(sick, 7, 4) == wanted
    assert {"failed", "released"} <= {use.miss for use in sick.stats().buckets}
    check_books(sick)


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 2, 5, 12, 20, 30])
def test_out_of_memory_in_capture_lets_the_start_go_on(make: Make, k: int) -> None:
    engine = make(faults=f"oom@capture:{k}")
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    assert 0 < len(graphs.list_captured()) < len(graphs.planned)
    assert all(graphs.state(b) >= ProgramState.COMPILED for b in graphs.planned)
    plan = engine.info().graphs
    assert plan is not None and sum("Allocation failed" in b.failed for b in plan.buckets) == 1
    traffic(engine, 5)
    check(engine)


@pytest.mark.parametrize("warmup", ["full", "skip"])
def test_a_tiny_reserve_captures_some_and_says_what_would_hold_the_plan(
    make: Make, warmup: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(graph_reserved_mem=0.00001, warmup=warmup, **SMALL)
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    small(engine, 1, 4)
    assert 0 < len(graphs.list_captured()) < len(graphs.planned)
    check(engine, compiled=engine.stats().graphs.lazy_compiles)
    if warmup == "skip":
        (said,) = [r.getMessage() for r in caplog.records if "holds the plan" in r.getMessage()]
    else:
        plan = engine.info().graphs
        assert plan is not None and not [r for r in caplog.records if "holds the plan" in r.getMessage()]
        said = plan.advice[0]
        assert "pool_full" in {use.miss for use in engine.stats().buckets} | {
            graphs.observer.missing_reason(b) for b in graphs.planned
        }
    found = re.search(r"VLLM_GRAPH_RESERVED_MEM=([\d.]+) holds the plan", said)
    assert found is not None
    held = make(kind="meta", graph_reserved_mem=float(found[1]), **SMALL)
    graphs = held.executor._rank.graphs  # type: ignore[attr-defined]
    assert len(graphs.list_captured()) == len(graphs.planned)


class Log:
    """What an engine did, in order: ``turn``, or the bucket of a piece of warm-up and its virtual seconds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.entries: list[tuple[str, float]] = []
        self._turn, self._warm = engine._step, engine.executor.warm
        engine._step, engine.executor.warm = self.turn, self.warm  # type: ignore[method-assign]

    def turn(self) -> Any:
        self.entries.append(("turn", 0.0))
        return self._turn()

    def warm(self) -> Any:
        assert not self.engine._flying, "warm-up is a step of its own"
        assert EmulatedRuntime.device is not None
        before = EmulatedRuntime.device.clock.seconds
        done = self._warm()
        state = done.result()
        if state is not None:
            self.entries.append((state.last, EmulatedRuntime.device.clock.seconds - before))
        return done


def test_background_takes_the_hottest_first_and_no_step_waits_for_more_than_one_compilation(
    make: Make, right: Right
) -> None:
    engine = make(warmup="background", warmup_stall=0.0, **SMALL)
    graphs = engine.executor._rank.graphs  # type: ignore[attr-defined]
    assert not graphs.list_captured() and engine.busy()
    assert small(engine, 3, 1) == right(3, 1)
    assert not graphs.list_captured(), "a stall of 0 leaves warm-up to idle times"
    hottest = max(graphs.hits.values())
    log = Log(engine)
    engine.step()
    (first,) = graphs.list_captured()
    assert graphs.hits[first] == hottest and log.entries == [(str(first), 0.0), ("turn", 0.0)]
    engine._pace.stall = 50.0
    assert small(engine, 4, 8) == right(4, 8)
    assert any(seconds for _, seconds in log.entries), "nothing was compiled between steps"
    for (before, _), (after, _) in itertools.pairwise(log.entries):
        assert "turn" in (before, after), "two pieces of warm-up without a turn for steps between"
    while engine.busy():
        engine.step()
    stats = engine.stats()
    assert len(graphs.list_captured()) == len(graphs.planned) and stats.graphs.recompiles == 0
    assert stats.graphs.warming is not None and stats.graphs.warming.phase == "warm"
    assert {use.miss for use in stats.buckets} == {"warming", ""}
    lazy = stats.graphs.lazy_compiles
    small(engine, 5)
    check(engine, compiled=lazy)
    assert {use.miss for use in engine.stats().buckets} <= {""}


def test_measured_graphs_are_used_by_the_next_start(make: Make) -> None:
    first = make(kind="meta", **SMALL)
    assert first.info().graphs is not None
    second = make(kind="meta", graph_memory="auto", **SMALL)
    pools = second.info().graphs.pools  # type: ignore[union-attr]
    assert all(spent <= budget for budget, spent, _ in pools.values())
    reserve = dict(second.info().graphs.ledger)["graph reserve unused"]  # type: ignore[union-attr]
    assert reserve < dict(first.info().graphs.ledger)["graph reserve unused"] // 10  # type: ignore[union-attr]


def test_what_cannot_fit_is_refused_before_loading(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trencadis.core.models.model_loader.load_model", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(StartupError, match=r"--gpu-memory-utilization 0\.0\d fits"):
        make(gpu_memory_utilization=0.000001)


def test_a_start_by_profile_has_fewer_graphs_and_compiles_nothing_later(
    make: Make, vl_checkpoint: Path, tmp_path: Path
) -> None:
    """Needs of decoding alone: prompts run in the covers. Every launch is planned."""
    needs = NeedHistogram()
    for rows in range(1, 5):
        needs.add(Stage.DECODE, (rows, 4 * rows), 100)
    write_profile(str(tmp_path / "needs.json"), needs, 16)
    fewer = make(bucket_profile=str(tmp_path / "needs.json"), max_graphs=16)
    config = EngineConfig(model=str(vl_checkpoint), **FLAGS)
    all_sizes = make_plan(config, load_config(vl_checkpoint), 96 << 30).plan
    counts = len(all_sizes.buckets), len(fewer.executor._rank.graphs.planned)  # type: ignore[attr-defined]
    kept = {*KEPT_STAGES, Stage.VISION}  # sizes of images are set (VLLM_MULTIMODAL_BUCKETS)
    heads = len([b for b in fewer.executor._rank.plan.buckets if b.stage in kept])  # type: ignore[attr-defined]
    assert counts[1] - heads <= 16 < counts[0] - heads
    traffic(fewer, 12)
    check(fewer)
    with pytest.raises(StartupError, match=r"--max-graphs 1: these limits need at least \d"):
        make(bucket_profile=str(tmp_path / "needs.json"), max_graphs=1)
