"""Buckets from recorded needs: the search equals brute force, every need still fits, traces get by with 40 graphs."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces.generate import PICTURED, TRACES
from tests.traffic.launch_lines import GUIDE, LINES, model_of, plan_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.engine.bucket_search_process import HEDGE
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_options import BucketOptions, read_bucket_options
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import learn_from_profile, list_set_stages, read_profile, write_profile
from trencadis.core.shapes.bucket_search import CostTable, search_choice
from trencadis.core.shapes.launch_costs import Costs, work_of
from trencadis.core.shapes.measured_launch_times import fit_bytes
from trencadis.core.shapes.padding_lower_bound import bound_cost
from trencadis.core.shapes.plan_from_recorded_needs import (
    KEPT_STAGES,
    GraphMemoryLimits,
    TooFewGraphs,
    expected_cost,
    learn_plan,
    list_covers,
)
from trencadis.core.shapes.rectangular_launches import RowNeed, split_rows
from trencadis.core.shapes.sample_and_reset_sizes import HEADS, thin_heads
from trencadis.core.shapes.shape_need_histogram import RECORDED_STAGES, Key, NeedHistogram, count_step, round_to_grid
from trencadis.server.plan.trace_plan_comparison import StepNeeds, read_request, replay_steps, sum_planned_work

MODEL = model_of(3584, 28, 28, 4, 18944)
WORK = work_of(MODEL, 128)


def random_tables(rng: random.Random) -> list[CostTable]:
    """One or two groups of at most six needs in at most six candidates, the last of which is forced and holds all.

    In every other instance, choosing some candidates costs a charge.
    """
    tables, charged = [], rng.random() < 0.5
    for _ in range(rng.randint(1, 2)):
        needs, count = rng.randint(0, 6), rng.randint(2, 6)
        sizes = sorted((rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count - 1)) + [(9, 9)]
        costs = [
            [weight * (a * b + 3) if a >= x and b >= y else np.inf for a, b in sizes]
            for x, y, weight in ((rng.randint(1, 9), rng.randint(1, 9), rng.random()) for _ in range(needs))
        ]
        charges = np.array([rng.choice((0.0, 10 * rng.random())) for _ in range(count)]) if charged else None
        forced = np.array([False] * (count - 1) + [True])
        tables.append(CostTable(np.array(costs).reshape(needs, count), forced, charges))
    return tables


def brute_force(tables: list[CostTable], count: int) -> float:
    """The least cost of all choices of at most ``count``, in plain loops."""
    every = [(g, j) for g, t in enumerate(tables) for j in range(t.costs.shape[1])]
    forced = {(g, j) for g, j in every if tables[g].forced[j]}
    best = float("inf")
    free = sorted(set(every) - forced)
    sizes = range(min(count, len(every)) - len(forced) + 1)
    for some in itertools.chain.from_iterable(itertools.combinations(free, size) for size in sizes):
        taken = forced | set(some)
        total = sum(float(tables[g].fees[j]) for g, j in taken)
        for g, t in enumerate(tables):
            total += sum(min(row[j] for h, j in taken if h == g) for row in t.costs.tolist())
        best = min(best, total)
    return best


def check_search(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        tables = random_tables(rng)
        most = rng.randint(len(tables), sum(t.costs.shape[1] for t in tables))
        found = search_choice(tables, most)
        assert found.cost == pytest.approx(brute_force(tables, most))
        assert found.bound <= found.cost + 1e-9 and sum(map(len, found.chosen)) <= most


def test_the_search_equals_brute_force() -> None:
    check_search(100, 1)


@pytest.mark.long
def test_the_search_equals_brute_force_1000_times() -> None:
    check_search(1000, 2)


def test_graphs_fit_their_pools_and_cost_what_their_loss_is_worth() -> None:
    """Half of the bytes of a free choice beside the covers, which stay; the bound holds, and sizes are inferred."""
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    needs = learned(plan, "chat", 7, 25)

    def bytes_of(bucket: Bucket) -> float:
        return 1000.0 + 10 * padded_tokens(bucket)

    def total(buckets: Iterable[Bucket]) -> float:
        return sum(bytes_of(b) for b in buckets if b.stage in RECORDED_STAGES)

    free = learn_plan(plan, needs, 60, work=WORK)
    covers = learn_plan(plan, NeedHistogram(), 60).plan.buckets
    limit = total(covers) + (total(free.plan.buckets) - total(covers)) / 2
    limits = GraphMemoryLimits(bytes_of, ((frozenset(RECORDED_STAGES), limit),))
    found = learn_plan(plan, needs, 60, work=WORK, memory=limits)
    assert total(found.plan.buckets) <= limit < total(free.plan.buckets)
    assert free.cost <= found.cost and found.bound <= found.cost and found.graphs < free.graphs
    known = {b: round(bytes_of(b)) for b in plan.buckets}
    assert all(fit_bytes(known)(b) == pytest.approx(bytes_of(b), rel=0.05) for b in found.plan.buckets)


def test_a_hedged_plan_costs_other_traffic_little_more() -> None:
    """A plan learned from chat, with as many graphs as the plan of the limits, then serves documents."""
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    chat, other = learned(plan, "chat", 7, 25), learned(plan, "documents", 8, 25)
    most, static = sum(b.stage in RECORDED_STAGES for b in plan.buckets), expected_cost(plan, other)
    free, hedged = (learn_plan(plan, chat, most, work=WORK, hedge=hedge) for hedge in (0.0, HEDGE))
    assert expected_cost(free.plan, other) > 1.2 * static
    assert expected_cost(hedged.plan, other) < 1.05 * static
    assert expected_cost(hedged.plan, chat) < expected_cost(plan, chat)


def test_shapes_that_take_long_to_compile_are_fewer() -> None:
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    needs = learned(plan, "chat", 7, 25)
    free, charged = (learn_plan(plan, needs, 60, charges={s: c for s in RECORDED_STAGES}) for c in (0.0, 0.002))
    made = learn_plan(plan, needs, 60, charges=dict.fromkeys(RECORDED_STAGES, 0.002), present=free.plan.buckets)
    assert charged.graphs < free.graphs == made.graphs


def random_needs(plan: Plan, rng: random.Random, count: int) -> NeedHistogram:
    found = NeedHistogram()
    stages = sorted({b.stage for b in plan.buckets} - set(KEPT_STAGES))
    for _ in range(count):
        bucket = rng.choice(plan.of(rng.choice(stages)))
        found.add(bucket.stage, [rng.randint(1, d) for d in bucket.dims], rng.random())
    return found


@pytest.mark.long
@pytest.mark.parametrize("graphs", [40, 80, 176, 300])
def test_a_search_of_4096_cells_takes_two_seconds(graphs: int) -> None:
    plan, needs, rng = make_plan(SERVING, GUIDE, BucketOptions(), MODEL), NeedHistogram(), random.Random(0)
    while needs.count < 4090:
        needs.merge(random_needs(plan, rng, 100))
    for hedge, work in ((0.0, WORK), (HEDGE, None)):
        begun = time.process_time()
        found = learn_plan(plan, needs, graphs, work=work, hedge=hedge)
        took = time.process_time() - begun
        print(f"{graphs} graphs: {took:.2f} s, {found.cost / found.bound - 1:.3%} above the bound")
        assert took <= 2.0


def random_rows(plan: Plan, rng: random.Random) -> list[RowNeed]:
    limits = GUIDE
    rows = []
    for i in range(rng.randint(1, 24)):
        tokens = rng.choice((1, 1, 2, rng.randint(1, 300), rng.randint(1, 1300)))
        rows.append(RowNeed(i, rng.choice((0, 0, rng.randint(0, limits.max_model_len - tokens))), tokens))
    return rows


@pytest.mark.parametrize("name", LINES)
def test_every_need_that_fitted_still_fits(name: str) -> None:
    """The first plan's buckets, which bound all needs, and random steps; no bucket is larger than a planned one."""
    plan, limits = plan_of(name)
    rng = random.Random(name)
    for most in (30, 60):
        found = learn_plan(plan, random_needs(plan, rng, 300), most, work=WORK)
        assert found.graphs <= most and found.bound <= found.cost * (1 + 1e-9)
        for bucket in plan.buckets:
            if bucket.stage is not Stage.FRESH or bucket.dims[0] == 1:
                assert found.plan.find(bucket.stage, bucket.dims, bucket.variant), bucket
        for bucket in found.plan.buckets:
            assert any(
                o.stage is bucket.stage and all(x >= y for x, y in zip(o.dims, bucket.dims, strict=True))
                for o in plan.buckets
            )
        planned = set(found.plan.buckets)
        for _ in range(40):
            rows = [
                r for r in random_rows(plan, rng)[: limits.max_rows] if r.context + r.tokens <= limits.max_model_len
            ]
            rows = [r for r in rows if r.tokens <= limits.chunk]
            assert all(cut.bucket in planned for cut in split_rows(rows, found.plan)), rows


def steps_of(name: str, seed: int, count: int) -> list[StepNeeds]:
    records = {**TRACES, **PICTURED}[name](seed, count)
    return list(replay_steps([read_request(r) for r in sorted(records, key=lambda r: r["arrival"])], GUIDE))


def learned(plan: Plan, name: str, seed: int, count: int) -> NeedHistogram:
    found = NeedHistogram()
    for step in steps_of(name, seed, count):
        count_step(found, step.rows, step.images, plan)
    return found


def check_traces(name: str, seeds: range, judged: range, bars: dict[int, tuple[float, float]]) -> None:
    """Padded work and modelled time on ``judged`` seeds over those of the plan of the limits, means over these seeds.

    The plan is learned from all ``seeds`` together.
    """
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    time = plan.policy.cost
    assert isinstance(time, Costs)
    traffic = [steps_of(name, seed, 400) for seed in judged]
    static = [[sum_planned_work(steps, plan, costs).cost for costs in (WORK, time)] for steps in traffic]
    needs = NeedHistogram()
    for seed in seeds:
        needs.merge(learned(plan, name, seed, 400))
    for graphs, bar in bars.items():
        ratios = []
        found = learn_plan(plan, needs, graphs, work=WORK)
        assert found.graphs == graphs and found.cost <= 1.03 * found.bound
        for steps, before in zip(traffic, static, strict=True):
            ours = [sum_planned_work(steps, found.plan, costs) for costs in (WORK, time)]
            assert ours[0].unplanned == 0
            ratios.append([now.cost / then for now, then in zip(ours, before, strict=True)])
        means = np.mean(ratios, axis=0)
        print(name, graphs, means.round(3), np.max(ratios, axis=0).round(3))
        assert (means <= bar).all(), (graphs, means)


@pytest.mark.parametrize(("name", "padding"), [("chat", 0.945), ("documents", 1.02), ("image-chat", 1.02)])
def test_forty_graphs_serve_a_trace(name: str, padding: float) -> None:
    check_traces(name, range(202, 203), range(101, 102), {40: (padding, 1.03)})


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "forty", "eighty"),
    [
        ("chat", (0.952, 1.0), (0.92, 0.985)),
        ("documents", (1.02, 1.02), (1.0, 0.995)),
        ("image-chat", (1.02, 1.002), (0.97, 0.975)),
        ("scans", (0.91, 0.95), (0.905, 0.94)),
        ("video-mix", (1.013, 1.01), (0.98, 0.99)),
    ],
)
def test_graphs_on_many_seeds(name: str, forty: tuple[float, float], eighty: tuple[float, float]) -> None:
    check_traces(name, range(201, 204), range(101, 111), {40: forty, 80: eighty})


def test_too_few_graphs_say_the_least() -> None:
    plan, _ = plan_of("guide")
    with pytest.raises(TooFewGraphs) as error:
        learn_plan(plan, NeedHistogram(), 1)
    assert learn_plan(plan, NeedHistogram(), error.value.least).graphs == error.value.least


@pytest.mark.parametrize("sizes", [(896, 24, 14, 2, 4864), (3584, 28, 28, 4, 18944)])
def test_launches_that_cost_little_have_few_sizes(sizes: tuple[int, int, int, int, int]) -> None:
    """SAMPLE and RESET: every number of rows is held, and padding adds at most 2 % of a decoding launch."""
    plan = make_plan(SERVING, GUIDE, BucketOptions(), model_of(*sizes))
    thin, cost = thin_heads(plan), plan.policy.cost
    least = min(cost(b) for b in plan.of(Stage.DECODE))
    for stage in HEADS:
        assert 4 * len(thin.of(stage)) <= 3 * len(plan.of(stage)), (stage, thin.of(stage))
        for variant in sorted({b.variant for b in plan.of(stage)}):
            for rows in range(1, 129):
                before, after = (p.find(stage, (rows,), variant) for p in (plan, thin))
                assert before is not None and after is not None and cost(after) - cost(before) <= 0.02 * least
                assert stage is Stage.SAMPLE or after.dims[0] <= 4 * before.dims[0]
    assert [b for b in thin.buckets if b.stage not in HEADS] == [b for b in plan.buckets if b.stage not in HEADS]


def test_sample_has_the_sizes_that_its_traffic_needs() -> None:
    """By recorded rows: padding takes at most 2 % of decoding in all, and every number of rows is held."""
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    cost, known = plan.policy.cost, thin_heads(plan)
    assert thin_heads(plan, NeedHistogram()).buckets == known.buckets
    for rows, most in (([1, 2, 3], 2), ([2, 40, 60, 100], 3), ([128], 1)):
        needs = NeedHistogram()
        for r in rows:
            needs.add(Stage.DECODE, (r, 4 * r), 10)
        thin = thin_heads(plan, needs)
        sizes = {v: [b.dims[0] for b in thin.of(Stage.SAMPLE) if b.variant == v] for v in ("greedy", "full")}
        assert sizes["full"] == sizes["greedy"] and sizes["full"][-1] == 128 and len(sizes["full"]) <= most, sizes
        assert thin.of(Stage.RESET) == known.of(Stage.RESET) and set(thin.buckets) <= set(plan.buckets)
        after, before = (sum(cost(p.fit(Stage.SAMPLE, (r,), "full")) for r in rows) for p in (thin, plan))
        assert after - before <= 0.02 * sum(cost(plan.fit(Stage.DECODE, (r, 4 * r))) for r in rows)


def random_launches(plan: Plan, rng: random.Random) -> dict[Key, dict[tuple[int, ...], float]]:
    """Up to five needs of DECODE and of CONTEXT, which no grid has rounded."""
    return {
        (stage, ""): {
            tuple(rng.randint(1, n) for n in most): rng.random() for _ in range(rng.randint(1, 5))
        }
        for stage, most in ((Stage.DECODE, (60, 700)), (Stage.CONTEXT, (2000, 200)))
    }  # fmt: skip


def least_cost(plan: Plan, launches: dict[Key, dict[tuple[int, ...], float]], count: int) -> float:
    """The least work of all choices of ``count`` sizes beside the covers, in plain loops over every useful size."""
    needs = [(s, d, w) for (s, _), cells in launches.items() for d, w in cells.items()]
    units = plan.policy.alignment
    sizes = sorted({
        Bucket(s, tuple(-(-n // u) * u for n, u in zip((a[0], b[1]), units[s], strict=True)))
        for s, a, _ in needs for t, b, _ in needs if s is t
    })  # fmt: skip
    covers = [*list_covers(plan.of(Stage.DECODE)), *list_covers(plan.of(Stage.CONTEXT))]
    return min(
        sum(
            w * min(WORK(b) for b in [*covers, *some] if b.stage is s and all(map(int.__ge__, b.dims, d)))
            for s, d, w in needs
        )
        for some in itertools.combinations(sizes, count)
    )


def test_no_sizes_cost_less_than_the_proven_bound() -> None:
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    kept = learn_plan(plan, NeedHistogram(), 60).graphs
    for seed in range(20):
        launches = random_launches(plan, random.Random(seed))
        best, bound = least_cost(plan, launches, 2), bound_cost(plan, launches, kept + 2, WORK)
        assert 0.85 * best <= bound <= best * (1 + 1e-9), seed


def test_sizes_that_the_user_has_set_are_kept() -> None:
    options = read_bucket_options({"VLLM_DECODE_BS_BUCKET_MAX": "64", "VLLM_MULTIMODAL_BUCKETS": "1600,12544,65536"})
    plan = make_plan(SERVING, GUIDE, options, MODEL)
    unchanged = set(list_set_stages(plan, options))
    assert unchanged == {Stage.DECODE, Stage.VERIFY, Stage.VISION}
    found = learn_plan(plan, learned(plan, "chat", 3, 40), 20, unchanged)
    assert all(found.plan.of(stage) == plan.of(stage) for stage in unchanged) and found.graphs <= 20


def test_a_histogram_is_bounded_and_halves() -> None:
    rng = random.Random(4)
    needs = NeedHistogram(half_life=10.0, most=200)
    for _ in range(5000):
        needs.add(Stage.DECODE, (rng.randint(1, 128), rng.randint(1, 4096)))
        assert needs.count <= 201
    total = sum(weight for _, _, weight in needs.list_cells())
    assert total == pytest.approx(5000)
    needs.advance(10.0)
    assert sum(weight for _, _, weight in needs.list_cells()) == pytest.approx(2500)
    for _ in range(100):
        needs.advance(10.0)
    needs.add(Stage.DECODE, (1, 1))
    assert sum(weight for _, _, weight in needs.list_cells()) == pytest.approx(1, rel=1e-6)


def test_images_and_their_prompts_have_a_finer_grid() -> None:
    needs = NeedHistogram()
    for stage, dims in ((Stage.FRESH, (1, 3002)), (Stage.VISION, (12544,)), (Stage.CONTEXT, (3002, 70))):
        needs.add(stage, dims)
    assert [cell.dims for cell in needs.list_cells()] == [(1, 3008), (3072, 72), (12544,)]


def test_the_grid_has_sixteen_sizes_an_octave() -> None:
    assert [round_to_grid(n) for n in (1, 31, 32, 33, 1000, 1025)] == [1, 31, 32, 34, 1024, 1088]
    assert all(0 <= round_to_grid(n) - n <= n / 16 for n in range(1, 5000))


def test_a_profile_is_read_as_written(tmp_path: Path) -> None:
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    needs, path = learned(plan, "image-chat", 5, 60), tmp_path / "needs.json"
    write_profile(str(path), needs, 128)
    again = read_profile(str(path), plan.policy, 128)
    assert again.list_cells() == needs.list_cells() and list(tmp_path.iterdir()) == [path]
    assert learn_from_profile(str(path), plan, BucketOptions(), 40, WORK).plan.buckets == (
        thin_heads(learn_plan(plan, needs, 40, work=WORK).plan, needs).buckets
    )
    write_profile(str(path), needs, 128, least=5.0)
    assert all(weight >= 5 for _, _, weight in read_profile(str(path), plan.policy, 128).list_cells())
    with pytest.raises(StartupError, match="cannot be written"):
        write_profile(str(tmp_path / "none" / "needs.json"), needs, 128)


BAD = {
    "cut": '{"format": "trencadis bucket profile", "version": 1, "block_si',
    "list": "[1]",
    "other version": {"version": 2},
    "other blocks": {"block_size": 64},
    "NaN": {"cells": [["DECODE", "", [1, 1], float("nan")]]},
    "negative": {"cells": [["DECODE", "", [1, -1], 1]]},
    "weight": {"cells": [["DECODE", "", [1, 1], -1]]},
    "axes": {"cells": [["DECODE", "", [1], 1]]},
    "ragged": {"cells": [["PREFILL", "", [1, 1], 1]]},
    "stage": {"cells": [["LUNCH", "", [1, 1], 1]]},
    "many": {"cells": [["DECODE", "", [1, 1], 1]] * 5000},
    "no cells": {"cells": None},
    "huge": " " * 300_000,
}


@pytest.mark.parametrize("name", BAD)
def test_bad_profiles_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path, bad = tmp_path / "bad.json", BAD[name]
    good = {"format": "trencadis bucket profile", "version": 1, "block_size": 128, "cells": []}
    path.write_text(bad if isinstance(bad, str) else json.dumps({**good, **bad}))  # type: ignore[dict-item]
    with pytest.raises(StartupError, match="--bucket-profile") as error:
        read_profile(str(path), SERVING, 128)
    assert "\n" not in str(error.value)
