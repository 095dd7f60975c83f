"""A plan that changes while serving: ready before it is used, paid to the byte, and given up if any piece fails."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.device import FakeDevice, OutOfMemory, make_harness, small_plan
from tests.graphs.test_ranks import ThreadComm, together
from tests.traffic.requests import Traffic, pixels, random_request
from trencadis.backends.hpu.emulator import emulated_recipe_cache
from trencadis.backends.hpu.emulator.emulated_bridge import EmulatedRuntime
from trencadis.backends.hpu.emulator.emulated_recipe_cache import LaunchRates
from trencadis.backends.hpu.emulator.injected_faults import parse
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import ProgramState
from trencadis.core.engine.bucket_search_process import FoundBuckets
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.graph_and_bucket_learning_report import FAILURE, PUBLISHED
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.graphs.live_plan_change import PlanChange
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.shapes.measured_launch_times import LaunchTime, LaunchTimes, MeasuredCosts, residuals_of
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES, learn_plan
from trencadis.core.shapes.shape_need_histogram import NeedHistogram

MIB = 1 << 20
NEW = tuple(Bucket(Stage.FRESH, (1, t)) for t in (96, 192)) + (Bucket(Stage.DECODE, (2, 3)),)
GONE = (Bucket(Stage.FRESH, (1, 64)), Bucket(Stage.DECODE, (1, 2)))


def changed(plan: Plan) -> Plan:
    return dataclasses.replace(plan, version=2, buckets=tuple(sorted({*plan.buckets, *NEW} - set(GONE))))


def change_of(manager: GraphManager, captures: GraphCaptures, said: list[Plan]) -> PlanChange:
    return PlanChange(
        manager, captures, changed(manager.plan), lambda plan: [GraphPrice(b, MIB) for b in plan.buckets], said.append
    )


def check_sums(captures: GraphCaptures) -> None:
    """The ledger has every byte of the card, and no row has bytes that the card has not."""
    rows, memory = dict(captures.ledger.rows()), captures.graphs.backend.memory
    assert sum(rows.values()) == memory.total()
    assert memory.free() == rows["margin"] + rows["graph reserve unused"]


def run_change(manager: GraphManager, captures: GraphCaptures) -> None:
    """A full start, then a change; launches of the old plan run between the pieces."""
    Warmup(manager, captures).run_all()
    said: list[Plan] = []
    change = change_of(manager, captures, said)
    while change.advance() is not None:
        check_sums(captures)
        if not said and not change.failure:
            for bucket in small_plan().buckets:
                manager.run(bucket, None, 1)  # type: ignore[arg-type]
    assert bool(said) != bool(change.failure)
    assert manager.plan.version == (1 if change.failure else 2) and manager.planned == set(manager.plan.buckets)
    assert all(manager.state(b) is ProgramState.CAPTURED for b in manager.planned if b not in captures.failed)
    assert (manager.lazy_compiles, manager.recompiles) == (0, 0)


def alone(device: FakeDevice, **options: Any) -> tuple[GraphManager, GraphCaptures]:
    manager, captures = make_harness(device, **options)
    run_change(manager, captures)
    rows = dict(captures.ledger.rows())
    assert sum(rows.values()) == device.size
    assert device.used == device.size - rows["margin"] - rows["graph reserve unused"]
    return manager, captures


def test_new_buckets_are_ready_before_they_are_used_and_old_ones_return_their_bytes() -> None:
    device = FakeDevice(returned=1.0)
    manager, captures = alone(device)
    assert set(NEW) <= manager.planned and not set(GONE) & manager.planned
    assert captures.own.spent == {"text": 4 * MIB, "vision": 2 * MIB, "decode": 5 * MIB}
    assert not any(captures.own.lost.values()) and set(captures.by_bucket) == manager.planned
    assert all(captures.list_making_seconds()[b] > captures.took[b] > 0 for b in NEW)


@pytest.mark.parametrize("kind", ["compile", "capture"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_failure_at_any_piece_leaves_the_old_plan(kind: str, k: int) -> None:
    count = len(small_plan().buckets)
    device = FakeDevice(returned=1.0, fails={(kind, count + k): OutOfMemory()})
    manager, captures = alone(device)
    assert manager.plan.version == 1 and set(captures.by_bucket) == set(small_plan().buckets)
    assert captures.own.spent == {"text": 3 * MIB, "vision": 2 * MIB, "decode": 5 * MIB}
    assert not captures.accounts.closed and not captures.failed


def test_a_bucket_that_compiles_again_is_refused() -> None:
    manager, _ = make_harness(FakeDevice(returned=1.0, unstable={NEW[0]: 1}))
    captures = manager.observer._accounts
    assert isinstance(captures, GraphCaptures)
    Warmup(manager, captures).run_all()
    change = change_of(manager, captures, [])
    while change.advance() is not None:
        pass
    assert "compiled again" in change.failure and manager.plan.version == 1


def test_graphs_that_leave_make_room_for_new_ones() -> None:
    """A reserve that holds the old plan exactly: each new graph takes the place of one that goes."""
    device = FakeDevice(returned=1.0)
    manager, captures = make_harness(device)
    Warmup(manager, captures).run_all()
    for pool, spent in captures.accounts.spent.items():
        captures.accounts.budget[pool] = captures.own.budget[pool] = spent + MIB // 4
    change = change_of(manager, captures, [])
    while change.advance() is not None:
        pass
    assert not change.failure and sum(manager.state(b) is ProgramState.CAPTURED for b in NEW) == 2
    assert all(manager.state(b) >= ProgramState.COMPILED for b in manager.planned)


@pytest.mark.parametrize("fails", [{}, {("capture", 12): OutOfMemory()}, {("compile", 11): ValueError("no")}])
def test_ranks_change_together_or_not_at_all(fails: dict[tuple[str, int], Exception]) -> None:
    ranks = []
    devices = [FakeDevice(returned=1.0), FakeDevice(returned=1.0, fails=fails)]

    def work(manager: GraphManager, captures: GraphCaptures) -> None:
        assert isinstance(manager.backend.comm, ThreadComm)
        run_change(manager, captures)
        ranks.append(manager.plan.version)

    together(devices, work)
    assert ranks == ([1, 1] if fails else [2, 2])


# On the emulated card

FLAGS: dict[str, Any] = {
    "device": "hpu", "dtype": "float32", "max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 128,
    "block_size": 16, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 224 * 224},
    "num_gpu_blocks_override": 24, "encoder_cache_images": 2, "warmup_stall": 1.0,
}  # fmt: skip

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_FAULTS", "return:1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256,512")
    made: list[Engine] = []

    def create(compiled: bool = False, **flags: Any) -> Engine:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "01"[not compiled])
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


class Changes:
    """Forces a change to a random plan in every ``every``-th step."""

    def __init__(self, engine: Engine, every: int, seed: int) -> None:
        self.engine, self.every, self.rng = engine, every, random.Random(seed)
        self.steps, self.versions = 0, [1]
        assert engine._learning is not None
        self.learning = engine._learning
        engine._pace.stall, engine._pace.slice = 1e6, 0.0
        self.pieces, self._warm = 0, engine.executor.warm
        engine.executor.warm = self.warm  # type: ignore[method-assign]
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def warm(self) -> Any:
        self.pieces += 1
        state, watch = self._warm(), self.engine._watch
        if watch is not None and watch.captures is not None:
            watch.captures.observe()
            check_sums(watch.captures)
        return state

    def step(self) -> Any:
        self.steps, before, loaded = self.steps + 1, self.pieces, not self.engine.idle()
        if self.steps % self.every == 0 and not self.learning.busy and not self.engine.idle():
            self.learning.pending = self.random_plan()
        found = self._step()
        assert self.pieces - before <= 1 or not loaded, "a step waits for one piece of a change at most"
        if (version := self.learning.present().version) != self.versions[-1]:
            self.versions.append(version)
        return found

    def random_plan(self) -> FoundBuckets:
        static, needs = self.learning.settings.static, NeedHistogram()
        stages = sorted({b.stage for b in static.buckets} - set(KEPT_STAGES))
        for _ in range(60):
            bucket = self.rng.choice(static.of(self.rng.choice(stages)))
            needs.add(bucket.stage, [self.rng.randint(1, d) for d in bucket.dims], self.rng.random())
        most = self.rng.randint(*((14, 24) if not static.policy.mixed else (4, 8)))
        found = learn_plan(static, needs, most, self.learning.settings.unchanged)
        return FoundBuckets(found.plan.buckets, found.graphs, found.cost, found.bound, found.static)


def serve(engine: Engine, count: int, seed: int) -> dict[tuple[str, int], list[int]]:
    length = engine.info().max_model_len
    run = Traffic(engine, seed, count, length, engine.info().vocab_size, most=length // 12, aborts=0.02)
    run.run()
    return {key: tokens for key, tokens in run.tokens.items() if key[0] not in run.gone}


TIE = 1e-5
"""Log-probability by which two tokens may differ that are equally good in float32: sums of other shapes round anew."""


def is_tie(engine: Engine, seed: int, key: tuple[str, int], first: list[int], second: list[int]) -> bool:
    """Returns True if two greedy answers to a request of ``serve`` part where their tokens are equally good."""
    number, info = int(key[0][1:]), engine.info()
    drawn = random.Random(seed * 1_000_003 + number)
    request = random_request(drawn, number, info.max_model_len, info.vocab_size, info.max_model_len // 12)
    if request.params.temperature or key[1]:
        return False
    engine.add(dataclasses.replace(request, params=dataclasses.replace(request.params, n=1, logprobs=2)))
    said = []
    while not engine.idle():
        said += [token for delta in engine.step() for token in delta.logprobs]
        for name, index in engine.needs():
            engine.add_media(name, index, pixels(request.spans[index]))
    place = next(i for i, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
    best = said[place]
    near = best.top_logprobs[0] - best.top_logprobs[1] < TIE
    return near and {*best.top_ids[:2]} == {first[place], second[place]}


def check(engine: Engine) -> None:
    """Nothing compiled in a step, no shape outside the plan, books that add up, nothing lost."""
    stats = engine.stats()
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert all(use.planned for use in stats.buckets)
    captures = engine._watch.captures  # type: ignore[union-attr]
    assert captures is not None
    captures.observe()
    check_sums(captures)
    assert not any(captures.own.lost.values())


def change_in_flight(make: Make, count: int, every: int, seed: int, **flags: Any) -> Changes:
    static = make(learn_buckets="off", **flags)
    wanted = serve(static, count, seed)
    static.close()  # a process has one group of ranks
    engine = make(learn_buckets="on", **flags)
    changes = Changes(engine, every, seed)
    found = serve(engine, count, seed)
    common = found.keys() & wanted.keys()
    other = [key for key in common if found[key] != wanted[key]]
    assert len(common) > 0.8 * count and len(other) <= count // 500
    check(engine)
    assert all(is_tie(engine, seed, key, found[key], wanted[key]) for key in other), other
    assert changes.versions == [*range(1, len(changes.versions) + 1)]
    assert set(changes.learning.outcomes) == {PUBLISHED}
    print(f"{count} requests, {changes.steps} steps, {len(changes.versions) - 1} changes, {changes.pieces} pieces")
    print(f"{len(common)} answers, {len(other)} of them with a tie")
    return changes


SMALL: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False,
    "num_gpu_blocks_override": 64, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip


def test_a_request_to_learn_changes_the_shapes_between_two_steps(make: Make) -> None:
    """By what was recorded until then; a second request finds nothing better."""
    engine = make(learn_buckets="observe", max_graphs=8, bucket_profile="", **SMALL)
    serve(engine, 5, 2)
    learning = engine._learning
    assert learning is not None and learning.recorder.steps > 3
    for handled in (1, 2):
        engine.learn_buckets(force=True)
        assert learning.busy and engine.busy()
        while engine.busy():
            engine.step()
        assert learning.present().version == 2 and learning.handled == handled
    serve(engine, 5, 2)
    check(engine)
    report = learning.report()
    assert report.version == 2 and report.outcomes == {PUBLISHED: 1} and report.histogram


@pytest.mark.long
def test_shapes_change_while_requests_run(make: Make) -> None:
    assert len(change_in_flight(make, 16, 3, 1).versions) >= 3


TWIN: dict[str, Any] = {
    "device": "cuda", "policy": "twin", "max_model_len": 96, "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 16,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip


@pytest.mark.long
def test_shapes_change_on_the_twin(make: Make) -> None:
    assert len(change_in_flight(make, 40, 3, 2, **TWIN).versions) >= 3


@pytest.mark.long
def test_a_card_that_fails_in_a_change_serves_on(make: Make) -> None:
    engine = make(learn_buckets="on")
    assert EmulatedRuntime.device is not None
    EmulatedRuntime.device.faults = parse("oom@capture:2,return:1")
    changes = Changes(engine, 4, 5)
    serve(engine, 8, 3)
    outcomes = [c.outcome for c in changes.learning.history]
    assert FAILURE in outcomes and all(c.reason for c in changes.learning.history if c.outcome == FAILURE)
    check(engine)


@pytest.mark.long
def test_shapes_change_on_two_ranks(make: Make) -> None:
    """Both publish at the same Step: otherwise a collective would meet another shape."""
    assert len(change_in_flight(make, 16, 3, 4, tensor_parallel_size=2, **SMALL).versions) >= 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_shapes_change_in_compile_mode(make: Make, seed: int) -> None:
    assert len(change_in_flight(make, 100, 3, seed, compiled=True, **SMALL).versions) >= 3


@pytest.mark.long
@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_ten_changes_in_two_thousand_requests(make: Make, seed: int, twin: bool) -> None:
    """The five seeds together change shapes fifty times in ten thousand requests."""
    assert len(change_in_flight(make, 2000, 40, seed, **(TWIN if twin else {})).versions) > 10


@pytest.mark.long
def test_bytes_come_back_after_two_hundred_changes(make: Make) -> None:
    engine = make(learn_buckets="on", **SMALL)
    changes, before = Changes(engine, 1, 8), engine._watch.captures.graphs.backend.memory.free()  # type: ignore
    static = changes.learning.present().buckets
    while len(changes.versions) <= 200:
        serve(engine, 20, len(changes.versions))
    engine.step = changes._step  # type: ignore[method-assign]
    changes.learning.pending = FoundBuckets(static, len(static), 0, 0, 0)
    while changes.learning.pending is not None:
        engine.step()
    check(engine)
    captures = engine._watch.captures  # type: ignore[union-attr]
    assert captures is not None and changes.learning.present().buckets == static
    assert captures.graphs.backend.memory.free() == before


KILLED = """
import itertools, os, signal, sys, threading
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.engine_config import EngineConfig
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.graphs.live_plan_change import PlanChange
from trencadis.core.shapes.bucket_profile import read_profile
from tests.graphs.test_replan import FLAGS, SMALL, Changes, serve

model, profile = sys.argv[1:]
flags = {**FLAGS, **SMALL, "learn_buckets": "on", "max_graphs": 9, "bucket_profile": profile}

def die_at(piece):
    engine = create_engine(EngineConfig(model=model, **flags))
    attempt, left = PlanChange._attempt, [piece]
    def die(self, work, bucket):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(self, work, bucket)
    PlanChange._attempt = die
    serve(engine, 5, 2)
    def save():
        while True:
            engine._learning._save()
            for _ in range(6):
                engine._learning.recorder.count([], [64, 128])
    threading.Thread(target=save, daemon=True).start()
    engine._learning.pending = Changes(engine, 1 << 30, 1).random_plan()
    while engine.busy():
        engine.step()

for piece in itertools.count(1):
    child = os.fork()  # torch is imported once
    if not child:
        try:
            die_at(piece)
        finally:
            os._exit(sys.exc_info()[0] is not None)
    ended = os.waitpid(child, 0)[1]
    if os.WIFEXITED(ended) and not os.WEXITSTATUS(ended):
        break  # the change has fewer pieces
    assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL, ended
    assert read_profile(profile, SERVING, FLAGS["block_size"]).count
    print("killed at piece", piece, file=sys.stderr, flush=True)
print(piece - 1)
"""


@pytest.mark.long
def test_a_kill_at_each_piece_of_a_change_leaves_a_whole_profile(
    make: Make, vl_checkpoint: Path, tmp_path: Path
) -> None:
    """The process dies while it also writes its profile; the next one starts by what is there, and serves."""
    profile = tmp_path / "needs.json"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PT_HPU_LAZY_MODE": "1"}
    command = [sys.executable, "-c", KILLED, str(vl_checkpoint), str(profile)]
    ended = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    pieces = int(ended.stdout.split()[-1])
    print(f"killed at {pieces} pieces")
    assert pieces >= 6
    engine = make(learn_buckets="on", max_graphs=9, bucket_profile=str(profile), **SMALL)
    serve(engine, 5, 3)
    check(engine)


# What launches take


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_launch_times_are_learned_on_the_emulator(make: Make, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Its clock counts operations, products and bytes, with constants that the model does not see."""
    rng = random.Random(seed)
    rates = LaunchRates(*(10 ** rng.uniform(*ends) for ends in ((-5, -4), (-8, -6), (-12, -10), (-12, -10))))
    monkeypatch.setattr(emulated_recipe_cache, "LaunchRates", lambda: rates)
    engine = make(learn_buckets="observe")
    learning, runner = engine._learning, engine.executor._rank  # type: ignore[attr-defined]
    assert learning is not None and runner.graphs.timer is not None
    runner.graphs.timer.every = 1
    serve(engine, 150, seed)
    for _ in range(3):
        learning._next = 0.0
        learning.tick()
    halves: tuple[list[LaunchTime], list[LaunchTime]] = [], []
    for bucket, seconds in learning.times.list_seconds():
        for each in seconds:
            halves[rng.random() < 0.5].append(LaunchTime(bucket, each))
    half, held = LaunchTimes(learning.settings.time), halves[1]
    for launch in halves[0]:
        half.add(*launch)
    fitted = half.fit()
    assert fitted is not None
    paper = MeasuredCosts(fitted.paper, fitted.scale)
    found, before = residuals_of(fitted, held), residuals_of(paper, held)
    for stage, residual in found.items():
        print(f"{stage.name}: {residual.buckets} held out, {residual.median:.3f}, {residual.high:.3f}; "
              f"paper {before[stage].median:.3f}, {before[stage].high:.3f}")  # fmt: skip
    errors = sorted(abs(fitted(b) / seconds - 1) for b, seconds in held)
    assert errors[len(errors) // 2] <= 0.1 and errors[len(errors) * 95 // 100] <= 0.25
