"""The whole engine on the CPU twin of a card: its plan, its graphs, its answers, and what failures cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.thread_streams import watch_threads
from tests.traffic.requests import Traffic
from trencadis.assets import demo_path
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinFaults, TwinRuntime
from trencadis.core.device.backend import OutOfDeviceMemory, ProgramState
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import resolve_settings

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

    def create(faults: TwinFaults | None = None, **flags: Any) -> Engine:
        monkeypatch.setattr(TwinRuntime, "standing", faults)
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
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


@pytest.mark.parametrize("cache", ["auto", "fp8", pytest.param("int8", marks=pytest.mark.long)])
def test_every_bucket_is_captured_and_nothing_compiles_after_warmup(make: Make, cache: str) -> None:
    engine = make(kv_cache_dtype=cache)
    graphs, runtime = graphs_of(engine), runtime_of(engine)
    assert len(graphs.list_captured()) == len(graphs.planned) == 23
    compiled, captured, launched = runtime.compilations(), runtime.counts["capture"], runtime.counts["launch"]
    tokens(engine, 60)
    assert (
        engine.scheduler.totals.preemptions
        and engine.scheduler.totals.prefix_hits
        and engine.scheduler.totals.images_encoded
    )
    stats = engine.stats()
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert (runtime.compilations(), runtime.counts["capture"], runtime.counts["launch"]) == (
        compiled,
        captured,
        launched,
    )
    check_books(engine)


@pytest.mark.parametrize("flags", [{}, {"kv_offloading_size": 2.0**-6}, {"kv_cache_dtype": "int8", "async_depth": 0}])
def test_no_thread_works_on_the_default_stream(
    make: Make, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> None:
    """Steps run on a thread of their own; what torch does there outside the runtime would be ordered with nothing."""
    with watch_threads(monkeypatch) as found:
        engine = make(warmup="skip", **flags)
        tokens(engine, 40)
    assert not found
    assert engine.stats().host_hits or "kv_offloading_size" not in flags


def test_steps_wait_for_nothing_once_their_results_had_room(make: Make) -> None:
    """Page-locked memory for results is locked once, by calls that wait for the card; the same traffic locks none."""
    engine = make(warmup="skip")
    waits = runtime_of(engine).counts
    tokens(engine, 40, aborts=0)
    before = waits["implicit wait"]
    tokens(engine, 40, aborts=0)
    assert waits["implicit wait"] - before <= 2


def lacking(engine: Engine) -> dict[str, str]:
    """Planned buckets without a graph that would gain from one, and why."""
    captures, graphs = engine._watch.captures, graphs_of(engine)  # type: ignore[union-attr]
    assert captures is not None
    lost = set(graphs.planned) - set(graphs.list_captured())
    return {str(b): captures.failed.get(b, captures.missing_reason(b)) for b in lost if captures.is_worth_capturing(b)}


def test_beside_a_cache_that_takes_what_is_free_every_bucket_is_captured(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches work on views of the KV cache, most of the card's memory; a view is nothing that a graph takes."""
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    engine = make(policy="", num_gpu_blocks_override=None, max_num_seqs=1, max_num_batched_tokens=16)
    memory = graphs_of(engine).backend.memory
    assert dict(engine._watch.captures.ledger.rows())["KV cache"] > memory.total() // 2  # type: ignore[union-attr]
    assert graphs_of(engine).list_captured() and not lacking(engine)
    check_books(engine)


@pytest.mark.long
def test_the_default_line_has_a_graph_for_every_bucket_that_gains_from_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``TRENCADIS_CUDA_TWIN=1 serve --device cuda``, of which only the server is missing."""
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    config = resolve_settings(command_line_parser.parse(["--device", "cuda"]), {}).engine
    engine = create_engine(replace(config, model=str(demo_path())))
    try:
        assert len(graphs_of(engine).list_captured()) > 100 and not lacking(engine)
        check_books(engine)
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_the_same_tokens_over_an_8_bit_cache(make: Make, cache: str) -> None:
    want = tokens(make(device="cpu", policy="", kv_cache_dtype=cache), 4, aborts=0)
    for depth in (0, 1):
        assert tokens(make(async_depth=depth, kv_cache_dtype=cache), 4, aborts=0) == want


def test_the_same_tokens_as_the_cpu_at_both_depths_and_without_graphs(make: Make) -> None:
    want = tokens(make(device="cpu", policy=""), 4, aborts=0)
    for depth in (0, 1):
        assert tokens(make(async_depth=depth), 4, aborts=0) == want
    eager = make(enforce_eager=True)
    assert tokens(eager, 4, aborts=0) == want, "without graphs"
    assert not graphs_of(eager).list_captured() and not eager.stats().graphs.recompiles


def oom() -> OutOfDeviceMemory:
    return OutOfDeviceMemory("CUDA out of memory (injected)")


@pytest.fixture(scope="module")
def right(vl_checkpoint: Path) -> dict[tuple[str, int], list[int]]:
    """The CPU's tokens of two requests."""
    engine = create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, "device": "cpu", "policy": ""}))
    found = tokens(engine, 2, seed=5, aborts=0)
    engine.close()
    return found


@pytest.mark.parametrize("k", [1, 8, *(pytest.param(k, marks=pytest.mark.long) for k in range(2, 21) if k != 8)])
def test_out_of_memory_in_a_capture_costs_graphs_only(make: Make, right: Any, k: int) -> None:
    """Leaking 3 MiB, at whatever capture: no more graphs from that pool, all compiled, the answers the same."""
    engine = make(TwinFaults({("capture", k): oom()}, leaks=3 * MIB))
    graphs, captures = graphs_of(engine), engine._watch.captures  # type: ignore[union-attr]
    assert captures is not None and len(captures.failed) == 1 and len(captures.accounts.closed) == 1
    assert all(graphs.state(b) >= ProgramState.COMPILED for b in graphs.planned)
    assert sum(captures.own.lost.values()) >= 3 * MIB
    assert tokens(engine, 2, seed=5, aborts=0) == right
    assert (engine.stats().graphs.recompiles, engine.stats().graphs.lazy_compiles) == (0, 0)
    check_books(engine)


@pytest.mark.parametrize(
    ("kind", "returned"),
    [("replay", 0.0), *(pytest.param(*x, marks=pytest.mark.long) for x in [("replay", 1.0), ("launch", 0.0)])],
)
def test_out_of_memory_in_a_step_gives_a_graph_up(make: Make, right: Any, kind: str, returned: float) -> None:
    """A release that returns nothing costs that memory alone; ``launch`` fails where nothing is captured yet."""
    engine = make(warmup="full" if kind == "replay" else "skip")
    graphs, runtime = graphs_of(engine), runtime_of(engine)
    runtime.faults = TwinFaults({(kind, runtime.counts[kind] + 9): oom()}, returned=returned)
    assert tokens(engine, 2, seed=5, aborts=0) == right
    if kind == "replay":
        assert len(graphs.list_captured()) == len(graphs.planned) - 1
    check_books(engine)


def test_a_capture_that_the_card_refuses_costs_one_graph(make: Make, right: Any) -> None:
    engine = make(TwinFaults({("capture", 4): RuntimeError("operation not permitted when stream is capturing")}))
    captures = engine._watch.captures  # type: ignore[union-attr]
    assert captures is not None and not captures.accounts.closed
    assert len(graphs_of(engine).list_captured()) == len(graphs_of(engine).planned) - 1
    assert tokens(engine, 2, seed=5, aborts=0) == right
    check_books(engine)


def test_the_bucket_in_whose_capture_an_engine_died_is_left_out(make: Make) -> None:
    engine = make(skip_captures=["decode[4]"])
    lost = {str(b) for b in graphs_of(engine).planned} - {str(b) for b in graphs_of(engine).list_captured()}
    assert lost == {"decode[4]"}
    check_books(engine)


def test_graphs_that_are_given_up_return_what_they_shared_with_the_last_of_their_stage(make: Make) -> None:
    """Nodes at once; until a stage's last graph ends, the ledger says what has not come back."""
    engine = make(max_num_seqs=1, max_num_batched_tokens=16)
    graphs, captures = graphs_of(engine), engine._watch.captures  # type: ignore[union-attr]
    assert captures is not None
    runtime, free, cost = runtime_of(engine), graphs.backend.memory.free(), sum(captures.costs.values())
    while graphs.list_captured():
        held = {b: graphs.program(b)._graph for b in graphs.list_captured()}
        before = graphs.backend.memory.free()
        gone = graphs.release_least_used()
        back = graphs.backend.memory.free() - before
        left = runtime.pools[held[gone].pool]
        assert back == held[gone].nodes if left else back >= held[gone].nodes
        check_books(engine)
        missing = cost - sum(captures.costs[b] for b in graphs.list_captured()) - (graphs.backend.memory.free() - free)
        assert dict(captures.ledger.rows())["graphs not returned"] == missing
    assert graphs.backend.memory.free() == free + cost
    assert dict(captures.ledger.rows())["graphs not returned"] == 0 and not any(captures.own.spent.values())


def test_graphs_of_a_stage_share_their_memory(make: Make) -> None:
    """Captured largest first: later graphs of a stage cost their own bytes, and a release returns nodes."""
    engine = make()
    captures, runtime = engine._watch.captures, runtime_of(engine)  # type: ignore[union-attr]
    assert captures is not None
    graphs = [g for pool in runtime.pools.values() for g in pool]
    assert sum(captures.costs.values()) == sum(g.own for g in graphs) + sum(runtime._work.values())
    order = [b for b in captures.costs if b.stage.name == "PREFILL"]
    assert order == sorted(order, key=lambda b: -b.dims[0])
    program = graphs_of(engine).program(order[0])
    nodes = program._graph.nodes
    assert program._graph.own < captures.costs[order[0]] and program.release() == nodes


FEW: dict[str, Any] = {"num_gpu_blocks_override": 8}
ON = {
    "cpu": {"device": "cpu", "policy": "", **FEW}, "padded": {"device": "cpu", "policy": "padded", **FEW}, "twin": FEW,
}  # fmt: skip


def wild(engine: Engine, count: int, seed: int, aborts: float = 0) -> Traffic:
    """A run of requests of every kind."""
    run = Traffic(engine, seed, count, LENGTH, engine.info().vocab_size, most=8, aborts=aborts, wild=True)
    run.run()
    return run


@pytest.mark.parametrize(
    ("on", "seed", "count"),
    [("cpu", 0, 12), *(pytest.param(on, i, 30, marks=pytest.mark.long) for on in ON for i in range(20))],
)
def test_depth_1_answers_as_depth_0(make: Make, on: str, seed: int, count: int) -> None:
    """Random schedules with preemption, prefix hits, images, masks, stop ids and choices that their words end.

    Requests that are aborted besides end with a beginning of their answer.
    """
    flat, deep = (wild(make(async_depth=d, **ON[on]), count, seed) for d in (0, 1))
    assert flat.engine.scheduler.totals.preemptions and deep.engine.scheduler.totals.preemptions
    assert flat.stopped and "stop" in flat.ended.values()
    assert (flat.tokens, flat.stopped) == (deep.tokens, deep.stopped)
    cut = wild(make(async_depth=1, **ON[on]), count, seed, aborts=0.2)
    assert all(flat.tokens[key][: len(got)] == got for key, got in cut.tokens.items())
    assert cut.engine.scheduler.pool.used == 0
