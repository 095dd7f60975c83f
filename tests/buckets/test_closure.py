"""Every need that a scheduler can produce has a planned bucket."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.launch_lines import GUIDE, LINES, MODELS, model_of, plan_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.shapes.bucket_options import BucketOptions, read_bucket_options
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.rectangular_launches import RowNeed, split_rows
from trencadis.core.shapes.shape_limits import ShapeLimits, cells
from trencadis.server.plan.trace_plan_comparison import StepNeeds, list_vision_launches

SMALL = 50_000
"""Needs of a stage up to which all of them are tried."""


def near(sizes: tuple[int, ...], largest: int) -> list[int]:
    """Every boundary and its neighbours."""
    return sorted({n for s in sizes for n in (s - 1, s, s + 1) if 1 <= n <= largest} | {1, largest})


def context_needs(plan: Plan, limits: ShapeLimits) -> Iterator[tuple[int, int]]:
    most = min(limits.chunk, max(plan.sizes(Stage.CONTEXT, 0), default=0))
    small = most * limits.context_blocks <= SMALL
    tokens = range(1, most + 1) if small else near(plan.sizes(Stage.CONTEXT, 0), most)
    last = limits.context_blocks
    for t in tokens:
        for k in range(1, last + 1) if small else near(plan.sizes(Stage.CONTEXT, 1), last):
            # The shortest context that needs k blocks.
            if t + (k - 1) * limits.block_size + 1 <= limits.max_model_len:
                yield t, k


def decode_needs(plan: Plan, limits: ShapeLimits) -> Iterator[tuple[int, int]]:
    """(rows, blocks) of one launch: what is listed in more is cut, so a launch of R rows ends at its longest list."""
    rows = near(plan.sizes(Stage.DECODE, 0), min(limits.max_rows, plan.sizes(Stage.DECODE, 0)[-1]))
    listed = max(plan.sizes(Stage.DECODE, 1))
    for r in rows:
        most = min(r * limits.row_blocks, listed)
        small = most * len(rows) <= SMALL
        for k in range(r, most + 1) if small else near(plan.sizes(Stage.DECODE, 1), most):
            if r <= k:
                yield r, k


@pytest.mark.parametrize("name", LINES)
def test_every_stage_is_closed(name: str) -> None:
    plan, limits = plan_of(name)
    for t in range(1, limits.chunk + 1) if limits.chunk < SMALL else near(plan.sizes(Stage.FRESH, 1), limits.chunk):
        assert plan.is_within_boundaries(Stage.FRESH, (1, t)), t
    for need in context_needs(plan, limits):
        assert plan.is_within_boundaries(Stage.CONTEXT, need), need
    for need in decode_needs(plan, limits):
        assert plan.is_within_boundaries(Stage.DECODE, need), need
    for r in range(1, limits.max_rows + 1):
        assert plan.is_within_boundaries(Stage.RESET, (r,))
        assert plan.is_within_boundaries(Stage.SAMPLE, (r,), "greedy") and plan.is_within_boundaries(
            Stage.SAMPLE, (r,), "full"
        )


def rows_of(limits: ShapeLimits, rng: random.Random) -> list[RowNeed]:
    """Rows as a scheduler may hand them out: lengths and chunks near boundaries more often than not."""
    budget, needs = limits.max_tokens, []
    for i in range(rng.randint(1, limits.max_rows)):
        tokens = min(
            rng.choice((1, 1, 1, 2, rng.randint(1, 300), 2 ** rng.randint(1, 15) + rng.randint(-1, 1))), budget
        )
        tokens = max(min(tokens, limits.max_model_len), 1)
        most = limits.max_model_len - tokens
        edge = limits.block_size * rng.randint(0, 300) + rng.randint(-1, 1)
        context = min(max(rng.choice((0, 0, edge, rng.randint(0, most), most)), 0), most)
        needs.append(RowNeed(i, context, tokens))
        budget -= tokens
        if not budget:
            break
    return needs


def check_random(name: str, count: int, seed: int) -> None:
    plan, limits = plan_of(name)
    planned = set(plan.buckets)
    rng = random.Random(seed)
    done = 0
    while done < count:
        needs = rows_of(limits, rng)
        done += len(needs)
        for cut in split_rows(needs, plan):
            assert cut.bucket in planned, (cut, needs)


@pytest.mark.parametrize("name", LINES)
def test_random_steps_stay_inside_the_plan(name: str) -> None:
    check_random(name, 1500, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", LINES)
def test_a_million_random_needs(name: str) -> None:
    check_random(name, 1_000_000, 2)


def test_every_row_of_4096_tokens() -> None:
    """(tokens, context) of one row at model length 4096: all cells of 8 x 8, and every size without context."""
    plan = make_plan(SERVING, ShapeLimits(1, 4096, 4096, 128), BucketOptions())
    planned = set(plan.buckets)
    for tokens in range(1, 4097, 8):
        for context in (*range(0, 4097 - tokens, 128), *range(1, 4097 - tokens, 128), 4096 - tokens):
            assert all(c.bucket in planned for c in split_rows([RowNeed(0, context, tokens)], plan)), (tokens, context)


@pytest.mark.parametrize("sizes", [*MODELS, (896, 24, 14, 2, 4864), (1536, 28, 12, 2, 8960), (256, 4, 4, 2, 512)])
def test_the_guides_line_costs_under_220_graphs(sizes: Any) -> None:
    plan = make_plan(SERVING, GUIDE, BucketOptions(), model_of(*sizes) if sizes else None)
    assert len(plan.buckets) < 220


def test_the_guides_seven_vision_buckets() -> None:
    plan, limits = plan_of("guide, seven vision buckets")
    assert plan.sizes(Stage.VISION) == (1600, 3136, 4096, 6400, 7744, 9216, 12544)
    for slots in range(64, 12545, 64):
        assert plan.is_within_boundaries(Stage.VISION, (slots,))
    assert not plan.is_within_boundaries(Stage.VISION, (12608,)) and "1596x1596" in " ".join(plan.notes)
    launches = list(list_vision_launches([StepNeeds((), (*[3136] * 4, *[64] * 30))], plan))
    assert set(launches) <= set(plan.buckets) and sum(b.dims[0] for b in launches) >= 4 * 3136 + 30 * 64
    assert not set(list_vision_launches([StepNeeds((), (20032,))], plan)) & set(plan.buckets)
    assert limits.image_slots > 12544


def test_default_vision_buckets_cover_what_max_pixels_allows() -> None:
    plan, limits = plan_of("guide")
    assert all(plan.is_within_boundaries(Stage.VISION, (s,)) for s in range(64, limits.image_slots + 1, 64))
    assert plan.sizes(Stage.VISION)[:3] == (256, 576, 1024)


def test_min_pixels_401408_needs_a_bucket_of_2048_slots() -> None:
    limits = ShapeLimits(8, 2048, 2048, 128, image_slots=4096, least_slots=401408 // 196)
    sizes = make_plan(
        SERVING, limits, read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": "576,1600,3136,4096,12544,50176"})
    ).sizes
    assert sizes(Stage.VISION) == (3136, 4096, 12544)
    plan = make_plan(SERVING, limits, BucketOptions())
    assert min(plan.sizes(Stage.VISION)) == 3136 and plan.is_within_boundaries(Stage.VISION, (2048,))


def test_an_image_above_every_bucket_takes_an_escape() -> None:
    plan, _ = plan_of("guide, seven vision buckets")
    found = {plan.fit(Stage.VISION, (s,)).dims[0] for s in range(12608, 65537, 64)}
    assert len(found) <= 20 and all(s % 64 == 0 for s in found) and not found & set(plan.sizes(Stage.VISION))


def test_none_switches_vision_padding_off() -> None:
    plan = make_plan(SERVING, GUIDE, read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": "None"}))
    assert not plan.of(Stage.VISION) and plan.fit(Stage.VISION, (4160,)).dims == (4160,)
    assert any("not padded" in n for n in plan.notes)


def test_fit_is_the_cheapest_dominating_bucket() -> None:
    plan, limits = plan_of("4096")
    rng = random.Random(3)
    for _ in range(300):
        need = (rng.randint(1, 64), rng.randint(64, 2048))
        holds = [b for b in plan.of(Stage.DECODE) if b.dims[0] >= need[0] and b.dims[1] >= need[1]]
        best = min(holds, key=lambda b: (plan.policy.cost(b), b.dims), default=None)
        assert plan.find(Stage.DECODE, need) == best
    assert limits.row_blocks == 32


def test_a_cell_is_kept_if_its_corner_can_occur() -> None:
    kept = set(cells(((1, 2, 4), (10, 20)), ("smallest", "smallest"), lambda n: n[0] * n[1] <= 22))
    assert kept == {(1, 10), (2, 10), (4, 10), (1, 20), (2, 20)}


def test_a_file_is_closed_by_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    path.write_text("# rows, query, blocks\n(1, [128, 512], 0)\n(range(1, 5), 1, [4, 16])\n(1, 256, range(1, 9, 4))\n")
    limits = ShapeLimits(16, 2048, 4096, 128)
    plan = make_plan(SERVING, limits, read_bucket_options({"VLLM_BUCKETING_FROM_FILE": str(path)}))
    added = {Bucket(Stage.FRESH, (1, 2048)), Bucket(Stage.CONTEXT, (256, 32)), Bucket(Stage.DECODE, (1, 32))}
    assert added < set(plan.buckets) and len([n for n in plan.notes if "is added" in n]) == 3
    rng, planned = random.Random(4), set(plan.buckets)
    for _ in range(40):
        assert all(c.bucket in planned for c in split_rows(rows_of(limits, rng), plan))


@pytest.mark.parametrize("name", LINES)
def test_rows_with_drafts_get_planned_launches(name: str) -> None:
    """Whatever rows of one token are beside them; SAMPLE holds what such a step draws."""
    limits, env = LINES[name]
    options = read_bucket_options(env)
    rng = random.Random(name)
    for drafts in (1, 4, 16):
        plan = make_plan(SERVING, replace(limits, drafts=drafts), options)
        known = frozenset(plan.buckets)
        assert max(plan.sizes(Stage.SAMPLE)) >= min(limits.max_rows * (drafts + 1), 64)
        for _ in range(20):
            left, needs = max(limits.max_rows, 64), []
            for row in range(rng.randint(1, limits.max_rows)):
                tokens = min(rng.choice([1, 1, 2, drafts + 1]), left, limits.max_tokens, limits.max_model_len - 1)
                if tokens > 0:
                    left -= tokens
                    context = rng.randint(1, limits.max_model_len - tokens)
                    needs.append(RowNeed(row, context, tokens, drafted=tokens > 1))
            launches = split_rows(needs, plan)
            assert {launch.bucket for launch in launches} <= known
            assert sorted(piece.row for launch in launches for piece in launch.pieces) == [n.row for n in needs]
