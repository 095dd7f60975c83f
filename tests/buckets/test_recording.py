"""What an engine records of its traffic: bounded, private, shared by engines, and judged before it counts."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import random
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.traffic.launch_lines import GUIDE, model_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core import graph_and_bucket_learning_report
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, Bucket, Stage
from trencadis.core.engine import bucket_learning, bucket_search_process
from trencadis.core.engine.bucket_learning import OBSERVE, ON, BucketLearning, LearningSettings, PlanAccess
from trencadis.core.engine.workload_trace_writer import RequestTrace
from trencadis.core.errors import StartupError
from trencadis.core.graphs.graph_manager import LaunchTimer
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Delta, Request, SamplingParams
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import MAX_BYTES, merge_into_profile, read_profile
from trencadis.core.shapes.launch_costs import Costs
from trencadis.core.shapes.measured_launch_times import (
    LEAST_LAUNCHES,
    BucketTimes,
    LaunchTime,
    LaunchTimes,
    MeasuredCosts,
    describe_cost,
    parse_cost,
    residuals_of,
)
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES
from trencadis.core.shapes.rectangular_launches import RowNeed
from trencadis.core.shapes.shape_need_histogram import MAX_CELLS, NeedHistogram
from trencadis.core.shapes.shape_need_recorder import PERIOD_SECONDS, PERIODS, RECENT_SECONDS, NeedRecorder
from trencadis.server.plan.trace_plan_comparison import read_trace

MODEL = model_of(3584, 28, 28, 4, 18944)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(SERVING, GUIDE, BucketOptions(), MODEL)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def decode(rows: int, context: int = 400) -> list[RowNeed]:
    return [RowNeed(i, context, 1) for i in range(rows)]


def test_needs_are_counted_before_they_are_padded(plan: Plan) -> None:
    recorder = NeedRecorder(plan)
    recorder.count([RowNeed(0, 0, 77), RowNeed(1, 500, 33), *(RowNeed(i, 300, 1) for i in range(2, 7))], [256, 320])
    recorder.count([RowNeed(0, 64, 3, (), True)], [])
    recorder.count(decode(2), [], LORA)
    recorder.count([], [128], "", LORA)
    cells = {(c.key[0].name, c.key[1], c.dims): c.weight for c in recorder.snapshot().cells}
    wanted = {
        ("FRESH", "", (1, 77)), ("CONTEXT", "", (34, 4)), ("DECODE", "", (5, 15)), ("VISION", "", (576,)),
        ("DECODE", LORA, (2, 8)), ("VISION", LORA, (128,)),
    }  # fmt: skip
    assert cells == {cell: pytest.approx(1.0) for cell in wanted}


def test_idle_time_is_no_load_and_old_needs_fade(plan: Plan) -> None:
    clock = Clock()
    recorder = NeedRecorder(plan, 2 * RECENT_SECONDS, clock)
    recorder.count(decode(1), [])
    clock.now = 10_000.0
    recorder.count(decode(2), [])
    assert recorder.seconds == 1.0
    for _ in range(2 * round(RECENT_SECONDS)):
        clock.now += 0.5
        recorder.count(decode(3), [])
        recorder.collect()
    weights, recent = ({c.dims[0]: c.weight for c in recorder.snapshot(r).cells} for r in (False, True))
    assert recent[1] == pytest.approx(0.5, rel=0.02) and recorder.steps == 2 * RECENT_SECONDS + 2
    assert weights[1] == pytest.approx(0.5**0.5, rel=0.02)
    recorder.start_over()
    assert {c.dims[0]: c.weight for c in recorder.snapshot().cells} == pytest.approx(recent), "the traffic is another"


def record_random(plan: Plan, count: int) -> NeedRecorder:
    rng, clock = random.Random(1), Clock()
    recorder = NeedRecorder(plan, 3600.0, clock)
    recorder.begin_periods()
    for _ in range(count):
        clock.now += 0.1
        rows = [RowNeed(0, 0, rng.randint(2, 3000)), RowNeed(1, rng.randint(1, 30_000), rng.randint(2, 2000))]
        recorder.count([*rows, *decode(rng.randint(1, 120), rng.randint(1, 30_000))], [64 * rng.randint(1, 900)])
    return recorder


def test_memory_is_bounded(plan: Plan) -> None:
    recorder = record_random(plan, 1500)
    kept = recorder._lasting, recorder._recent, recorder._unsaved, *recorder._periods
    assert sum(histogram.count for histogram in kept) <= MAX_CELLS
    assert sum(c.weight for c in recorder.snapshot().cells) > 0


@pytest.mark.long
def test_memory_is_flat_over_ten_million_needs(plan: Plan) -> None:
    rng, needs = np.random.default_rng(2), NeedHistogram()
    pages = Path("/proc/self/statm")
    for part in range(100):
        if part == 10:
            before = int(pages.read_text().split()[1])
        rows, blocks = rng.poisson(16, 100_000), rng.lognormal(5, 0.8, 100_000).astype(int)
        for need in zip(rows.tolist(), blocks.tolist(), strict=True):
            needs.add(Stage.DECODE, need)
    grown = (int(pages.read_text().split()[1]) - before) * resource.getpagesize()
    print(f"{needs.count} cells, {grown / 1024:.0f} KiB more resident after 10,000,000 needs than after 1,000,000")
    assert needs.count <= MAX_CELLS and grown < 1 << 20


def test_engines_share_a_profile_and_small_counts_are_not_written(plan: Plan, tmp_path: Path) -> None:
    path = str(tmp_path / "needs.json")
    for count in (4, 9):
        recorder = NeedRecorder(plan)
        for _ in range(count):
            recorder.count(decode(8), [])
        recorder.count(decode(9), [])
        merge_into_profile(path, recorder.take_unsaved(5.0), plan.policy, 128, 5.0)
        kept = {c.dims[0]: c.weight for c in NeedRecorder.snapshot(recorder).cells}
        assert set(kept) == {8, 9}
    (cell,) = read_profile(path, SERVING, 128).list_cells()
    assert cell.dims[0] == 8 and cell.weight == pytest.approx(9)
    assert recorder.take_unsaved(1.0).list_cells()[0].dims[0] == 9
    merge_into_profile(path, NeedHistogram(), plan.policy, 128, 5.0, fade=0.1)
    assert not read_profile(path, SERVING, 128).list_cells()
    Path(path).write_text("{cut")
    with pytest.raises(StartupError, match="no profile"):
        merge_into_profile(path, NeedHistogram(), plan.policy, 128, 5.0)


def test_a_profile_has_no_word_of_any_prompt_and_at_most_256_kib(plan: Plan, tmp_path: Path) -> None:
    """Prompts reach the recorder as counts alone; here every token of 1,000 secrets is looked for in the file."""
    rng, path = random.Random(3), tmp_path / "needs.json"
    secrets = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(1000)]
    recorder = record_random(plan, 200)
    for secret in secrets:
        recorder.count([RowNeed(0, 0, len(secret))], [])
    merge_into_profile(str(path), recorder.take_unsaved(1.0), plan.policy, 128, 1.0)
    text = path.read_text()
    assert len(text) <= MAX_BYTES
    assert not any(s[i : i + 4] in text for s in secrets for i in range(len(s) - 3) if s[i : i + 4] not in "trencadis")
    assert set(json.loads(text)) == {"format", "version", "block_size", "cells"}


# Judging


def learning_of(plan: Plan, mode: str, clock: Clock) -> BucketLearning:
    assert isinstance(plan.policy.cost, Costs)
    settings = LearningSettings(plan, 40, plan.policy.cost, mode)
    recorder, access = NeedRecorder(plan, 3600.0, clock), PlanAccess(lambda: plan)
    return BucketLearning(settings, recorder, access, clock, bucket_search_process.solve)


def feed(learning: BucketLearning, clock: Clock, seconds: float, rows: int) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        learning.recorder.count(decode(rows, 33_000 // rows), [])
        learning.tick()
        if learning._thread is not None:
            learning._thread.join()


@pytest.mark.parametrize("mode", [OBSERVE, ON])
def test_a_proposal_is_judged_by_later_traffic(plan: Plan, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows over many blocks, for which the limits' plan has no near bucket; then they change, or do not."""
    monkeypatch.setattr(bucket_learning, "SEARCH_SECONDS", 60.0)
    monkeypatch.setattr(bucket_learning, "LEAST_STEPS", 50)
    clock = Clock()
    learning = learning_of(plan, mode, clock)
    feed(learning, clock, 70.0, 5)
    assert learning.history[-1].outcome == graph_and_bucket_learning_report.PROPOSED and learning.pending is None
    assert learning.report().proposal is not None and learning.report().steps > 100
    feed(learning, clock, PERIODS * PERIOD_SECONDS + 5, 5)
    assert learning._gain > 0
    assert (learning.pending is not None) == (mode == ON)
    if mode == ON:
        return
    shown, proposed = learning.report().proposal, learning.outcomes[graph_and_bucket_learning_report.PROPOSED]
    assert shown is not None and shown.gain > 0, "a proposal that pays is shown, and shapes are searched again"
    feed(learning, clock, 400.0, 11)
    assert learning.outcomes[graph_and_bucket_learning_report.PROPOSED] == proposed + 1


def test_a_search_without_needs_is_answered(plan: Plan) -> None:
    clock = Clock()
    learning = learning_of(plan, OBSERVE, clock)
    learning.request(force=True)
    learning.wait(5.0)
    learning.tick()
    assert learning.handled == 1 and learning.pending is None and not learning.busy
    assert learning.history[-1].reason == "nothing has been recorded"


def test_needs_that_cannot_be_saved_are_kept(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system without locks, then one with them; the log has one line about it."""
    clock = Clock()
    learning = learning_of(plan, OBSERVE, clock)
    learning.settings = dataclasses.replace(learning.settings, profile=str(tmp_path / "needs.json"))
    for _ in range(9):
        learning.recorder.count(decode(8), [])

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        learning.save()
        learning.save()
    assert [r.levelname for r in caplog.records if "are not kept" in r.message] == ["WARNING"]
    assert not (tmp_path / "needs.json").exists()
    learning.save()
    (cell,) = read_profile(learning.settings.profile, SERVING, 128).list_cells()
    assert cell.weight == pytest.approx(9)


def test_a_search_runs_in_a_process_of_its_own(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers as one in this process would; one that fails, or takes too long, is noted and harms nothing."""
    clock, tasks = Clock(), list[bucket_search_process.Task]()
    learning = learning_of(plan, OBSERVE, clock)
    for i in range(30):
        learning.recorder.count(decode(1 + i, 100 + i), [])
    for i in range(300):
        learning.times.add(plan.of(Stage.DECODE)[i % 9], 0.001 * (1 + i % 9))

    def solve(task: bucket_search_process.Task) -> bucket_search_process.Answer:
        tasks.append(task)
        return bucket_search_process.solve_in_child(task)

    learning.solve = solve
    learning.request(force=True)
    learning.wait(60.0)
    learning.tick()
    assert learning.pending == bucket_search_process.solve(tasks[0])
    assert learning.pending.time is not None and learning.report().residuals.keys() == {"decode"}
    learning.pending = None
    monkeypatch.setattr(bucket_search_process, "PATIENCE", 0.01)
    learning.request()
    learning.wait(60.0)
    clock.now += 1
    learning.tick()
    assert learning.history[-1].reason == "the search took longer than 0.01 s" and not learning.busy


def test_tasks_and_answers_survive_json(plan: Plan) -> None:
    needs = record_random(plan, 9).snapshot().cells
    costs = plan.policy.cost
    assert isinstance(costs, Costs)
    measured = MeasuredCosts(costs, 1e-4, {(Stage.DECODE, ""): (0.5, 1.0, 2.0)})
    learn = bucket_search_process.LearnTask(
        plan, needs, 40, costs, (Stage.VISION,), plan.buckets[:3], {Stage.DECODE: 1e-4}, 7,
        [BucketTimes(plan.buckets[0], [0.1, 0.2])], recent=needs[:5],
    )  # fmt: skip
    price = bucket_search_process.PriceTask([needs, needs[:3]], plan, plan, plan, plan, measured)
    for task in (learn, price):
        again = bucket_search_process.parse_task(json.loads(json.dumps(bucket_search_process.describe_task(task))))
        assert bucket_search_process.describe_task(again) == bucket_search_process.describe_task(task)
        answer = bucket_search_process.solve(task)
        assert bucket_search_process.solve(again) == answer
        assert (
            bucket_search_process.parse_answer(json.loads(json.dumps(bucket_search_process.describe_answer(answer))))
            == answer
        )


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.0, ""), (1.02, ""), (1.12, graph_and_bucket_learning_report.REVERTED)]
)
def test_a_change_that_does_not_pay_is_taken_back(plan: Plan, factor: float, outcome: str) -> None:
    """After 1,000 launches; then no change begins for a day."""
    clock, rng = Clock(), random.Random(5)
    rank = SimpleNamespace(plan=plan, launches=0, times=list[LaunchTime]())

    def take() -> list[LaunchTime]:
        taken, rank.times = rank.times, []
        return taken

    def launch(count: int, factor: float) -> None:
        for _ in range(count):
            bucket = rng.choice(rank.plan.of(Stage.DECODE))
            rank.launches += 16
            rank.times.append(LaunchTime(bucket, factor * 1e-4 * plan.policy.cost(bucket) * rng.gauss(1, 0.03)))
        clock.now += 1.0
        learning.tick()

    learning = learning_of(plan, ON, clock)
    learning.rank = PlanAccess(lambda: rank.plan, lambda: "", take, lambda: rank.launches)
    for i in range(300):
        learning.recorder.count(decode(1 + i % 40, 100 + i), [])
    launch(300, 1.0)
    learning.request(force=True)
    learning.wait(60.0)
    launch(1, 1.0)
    assert learning.pending is not None
    change(learning, rank)
    assert learning.history[-1].outcome == graph_and_bucket_learning_report.PUBLISHED
    launch(40, factor)
    assert learning.pending is None, "too few launches"
    launch(40, factor)
    assert (learning.pending is not None) == bool(outcome)
    if outcome:
        assert set(learning.pending.buckets) == set(plan.buckets)
        change(learning, rank)
        assert learning.history[-1].outcome == outcome and rank.plan.version == 3
        assert learning.rate.refuses(clock.now + 80_000.0) == graph_and_bucket_learning_report.HELD
        assert not learning.rate.refuses(clock.now + 90_000.0)


def change(learning: BucketLearning, rank: SimpleNamespace) -> None:
    """What the engine and its ranks do for a change."""
    before = rank.plan
    kept = [b for b in before.buckets if b.stage in KEPT_STAGES]
    buckets = tuple(sorted({*kept, *learning.begin_change()}))
    rank.plan = dataclasses.replace(before, version=before.version + 1, buckets=buckets)
    learning.end_change(before)


# What launches take


def test_the_cost_of_a_launch_is_the_sum_of_its_terms(plan: Plan) -> None:
    """And a model without factors is the policy's cost in seconds."""
    costs = plan.policy.cost
    assert isinstance(costs, Costs)
    for bucket in plan.buckets:
        assert sum(costs.terms(bucket)) == pytest.approx(costs(bucket))
        assert MeasuredCosts(costs, 2.0)(bucket) == pytest.approx(2 * costs(bucket))


@pytest.mark.parametrize("seed", range(3))
def test_seconds_of_launches_are_learned_from_some_of_them(plan: Plan, seed: int) -> None:
    """Hidden factors, noise and stalls; on launches that were held out the bars are 10 and 25 %."""
    rng, paper = random.Random(seed), plan.policy.cost
    assert isinstance(paper, Costs)
    counts = {b.stage: len(paper.terms(b)) for b in plan.buckets}
    stages = {stage: [10 ** rng.uniform(-1, 1) for _ in range(count)] for stage, count in counts.items()}
    scales = {(b.stage, b.variant): 10 ** rng.uniform(-0.5, 0.5) for b in plan.buckets}
    factors = {key: tuple(scale * f for f in stages[key[0]]) for key, scale in scales.items()}
    truth = MeasuredCosts(paper, 10 ** rng.uniform(-6, -3), factors)
    times = LaunchTimes(paper)
    known = [b for b in plan.buckets if rng.random() < 0.5]
    for i in range(1500):
        bucket = rng.choice(known)
        times.add(bucket, truth(bucket) * rng.gauss(1, 0.05) * (20 if rng.random() < 0.02 else 1))
        assert (times.fit() is None) == (i + 1 < LEAST_LAUNCHES) if i in (198, 199) else True
    found = times.fit()
    assert found is not None
    for residual in residuals_of(found, [LaunchTime(b, truth(b)) for b in plan.buckets if b not in known]).values():
        assert residual.median <= 0.1 and residual.high <= 0.25
    assert parse_cost(json.loads(json.dumps(describe_cost(found)))) == found


# Traces


@pytest.mark.parametrize("fails", ["start", "stop", "read"])
def test_a_device_that_cannot_measure_launches_serves_on(fails: str) -> None:
    """Its events refuse once: the launch runs, and no later one asks them."""
    asked: list[str] = []

    class Watch:
        def __init__(self) -> None:
            self.note("start")

        def note(self, what: str) -> None:
            asked.append(what)
            if what == fails:
                raise RuntimeError("events without timing")

        def stop(self) -> None:
            self.note("stop")

        def read(self) -> float | None:
            self.note("read")
            return 1.0

    timer, bucket = LaunchTimer(Watch, every=1), Bucket(Stage.DECODE, (1, 16))
    for _ in range(3):
        if (begun := timer.begin()) is not None:
            timer.end(bucket, begun)
        assert timer.take() == []
    assert asked.count(fails) == 1 and asked[-1] == fails


def test_a_recorded_trace_can_be_planned_by(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = RequestTrace(str(path))
    secret = list(range(900, 960))
    trace.begin(Request("a-secret-id", secret, SamplingParams(n=2), [MediaSpan(1, 4, "cafe", (1, 8, 8), 64)]), 100.0)
    trace.begin(Request("b", [1, 2, 3], SamplingParams()), 101.26)
    trace.take([Delta("b", tokens=[5, 6], finish="stop")])
    assert not path.read_text(), "an earlier request still runs"
    trace.take([Delta("a-secret-id", 0, [1], cached_tokens=16), Delta("a-secret-id", 1, [1], finish="length")])
    trace.take([Delta("a-secret-id", 0, [2], finish="stop")])
    trace.close()
    found = read_trace(str(path))
    assert [(t.arrival, t.prompt, t.output, t.cached, t.images) for t in found] == [
        (0.0, 60, 2, 16, (64,)), (0.0, 60, 1, 60, ()), (1.3, 3, 2, 0, ())
    ]  # fmt: skip
    assert not any(word in path.read_text() for word in ("secret", "cafe", "900"))
    again = RequestTrace(str(path))
    again.begin(Request("c", [1], SamplingParams()), 7.0)
    again.close()
    assert len(read_trace(str(path))) == 3, "a request that drew nothing is left out"
    with path.open("a") as file:  # as a process that was killed leaves it
        file.write('{"arrival": 7.0, "prom')
    RequestTrace(str(path)).close()
    assert len(read_trace(str(path))) == 3
    (tmp_path / "other").write_text("no trace\n")
    for bad in (tmp_path / "other", tmp_path / "none" / "trace"):
        with pytest.raises(StartupError, match="--record-trace"):
            RequestTrace(str(bad))
