"""Cutting Steps for a device that runs rectangles."""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traffic.launch_lines import plan_of
from trencadis.backends.cuda.shape_policy import SERVING as CUDA
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.launches.host_inputs import text_inputs
from trencadis.core.launches.launch_splitter import Launch, part_of, sample_bucket, score_rows, split_step
from trencadis.core.shapes.bucket_options import BucketOptions, read_bucket_options
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.rectangular_launches import RowNeed, split_rows
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import Draw, Encode, ImageRows, Reset, Row, Sample, Step

BLOCK = 128
GUIDE, _ = plan_of("guide")
PADDING, _ = plan_of("3000, padding")


def row(key: int, context: int, tokens: int, blocks: Sequence[int] = (), block: int = BLOCK) -> Row:
    """A row with blocks of its own unless some are given."""
    count = -(-(context + tokens) // block)
    own = tuple(blocks) or tuple(range(1000 * (key + 1), 1000 * (key + 1) + count))
    positions = np.broadcast_to(np.arange(context, context + tokens, dtype=np.int32), (3, tokens))
    return Row(key, key + 1, context, tuple(range(tokens)), own, positions, samples=(Draw(key, key + 1, Sample()),))


ROWS = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(1, 2900)),
        st.one_of(st.just(1), st.integers(2, 90), st.integers(2, 2000)),
    ).filter(lambda r: r[0] + r[1] <= 3000),
    min_size=1,
    max_size=60,
)


@pytest.mark.parametrize("plan", [GUIDE, PADDING], ids=["guide", "padding"])
@given(rows=ROWS)
@settings(max_examples=120, deadline=None)
def test_every_token_runs_once_in_a_planned_bucket_and_in_order(plan: Plan, rows: list[tuple[int, int]]) -> None:
    step = Step(1, tuple(row(i, c, n, block=plan.block_size) for i, (c, n) in enumerate(rows)))
    launches = split_step(step, plan)
    assert launches == split_step(step, plan)
    done = [0] * len(rows)
    for launch in launches:
        assert launch.bucket in plan.buckets
        parts = launch.parts(step)
        assert launch.tokens(step) == sum(stop - start for _, start, stop in parts)
        for i, start, stop in parts:
            assert start == done[i] and stop > start, "a part before the tokens that it attends to"
            done[i] = stop
        check_shape(plan, launch, [(rows[i][0] + start, stop - start) for i, start, stop in parts])
    assert done == [n for _, n in rows]
    each = [split_rows([RowNeed(i, c, n)], plan) for i, (c, n) in enumerate(rows)]
    alone = sum(plan.policy.cost(cut.bucket) for cuts in each for cut in cuts)
    assert sum(plan.policy.cost(launch.bucket) for launch in launches) <= alone * (1 + 1e-9)


def check_shape(plan: Plan, launch: Launch, parts: list[tuple[int, int]]) -> None:
    """The bucket holds what runs in it, and is the one that `fit` names."""
    stage, dims = launch.bucket.stage, launch.bucket.dims
    if stage is Stage.FRESH:
        need = (len(parts), max(n for _, n in parts))
        assert all(c == 0 for c, _ in parts) and (len(parts) == 1 or need[1] <= plan.policy.fresh_tokens)
    elif stage is Stage.CONTEXT:
        assert len(parts) == 1 and parts[0][0] > 0 and parts[0][1] <= plan.policy.context_tokens
        need = (parts[0][1], -(-parts[0][0] // plan.block_size))
    else:
        assert stage is Stage.DECODE and all(n == 1 for _, n in parts)
        need = (len(parts), sum(c // plan.block_size + 1 for c, _ in parts))
    assert all(d >= n for d, n in zip(dims, need, strict=True)) and plan.fit(stage, need) == launch.bucket


def test_a_merge_must_not_cost_more_than_its_parts() -> None:
    launches = split_step(Step(1, (row(0, 0, 120), row(1, 0, 100), row(2, 0, 1000), row(3, 0, 60))), GUIDE)
    shapes = {launch.bucket.dims: launch.items for launch in launches}
    assert all(launch.bucket.stage is Stage.FRESH for launch in launches)
    assert 2 in shapes[(1, 1024)] and len(shapes[(1, 1024)]) == 1, "a long prompt pads three short ones"
    assert sum(len(i) for i in shapes.values()) == 4 and len(shapes) < 4


def test_a_long_prompt_is_cut_where_the_rest_is_cheaper() -> None:
    launches = split_step(Step(1, (row(0, 0, 16500),)), GUIDE)
    assert launches[0].bucket == Bucket(Stage.FRESH, (1, 16384)) and launches[0].ranges == ((0, 16384),)
    assert launches[1].bucket.stage is Stage.CONTEXT and launches[1].ranges == ((16384, 16500),)


def test_the_end_of_a_chunk_is_cut_where_that_is_cheaper() -> None:
    launches = split_step(Step(1, (row(0, 1000, 1030),)), GUIDE)
    assert [launch.ranges for launch in launches] == [((0, 1024),), ((1024, 1030),)]
    assert len(split_step(Step(1, (row(0, 1000, 1000),)), GUIDE)) == 1


def test_many_blocks_are_listed_in_several_launches() -> None:
    plan = make_plan(SERVING, ShapeLimits(64, 8192, 32768, 128), BucketOptions())
    step = Step(1, tuple(row(i, 32000, 1, blocks=range(251)) for i in range(64)))
    launches = split_step(step, plan)
    assert len(launches) >= 4 and all(launch.bucket.dims[1] <= plan.policy.decode_blocks for launch in launches)
    assert [i for launch in launches for i in launch.items] == list(range(64))


def test_a_row_that_reads_a_block_of_a_decoding_row_runs_after_it() -> None:
    """Row 0 fills block 7 with its token; row 1 begins with that block in the same Step."""
    rows = (row(0, 127, 1, (7,)), row(1, 128, 50, (7, 8)), row(2, 0, 30), row(3, 300, 1))
    launches = split_step(Step(1, rows), GUIDE)
    order = [i for launch in launches for i in launch.items]
    assert order.index(0) < order.index(1) and sorted(order) == [0, 1, 2, 3]
    free = split_step(Step(1, (rows[0], row(1, 128, 50), rows[2], rows[3])), GUIDE)
    assert [launch.bucket.stage for launch in free] == [Stage.FRESH, Stage.CONTEXT, Stage.DECODE]


MIXTURES = st.lists(
    st.tuples(st.integers(0, 700), st.one_of(st.just(1), st.integers(1, 500)), st.integers(0, 30)),
    min_size=1,
    max_size=14,
)
"""(context, tokens, the earlier row whose blocks it begins with, if there is such a row)"""


@given(MIXTURES)
@settings(max_examples=150, deadline=None)
def test_nothing_is_read_before_it_is_written(made: list[tuple[int, int, int]]) -> None:
    """Rows that begin with the full blocks that an earlier row of the same Step completes, in any mixture."""
    rows: list[Row] = []
    for i, (context, tokens, friend) in enumerate(made):
        shared: tuple[int, ...] = ()
        if friend < i:
            other = rows[friend]
            shared = other.blocks[: (other.context + len(other.tokens)) // BLOCK]
            context = len(shared) * BLOCK
        own = range(1000 * (i + 1), 1000 * (i + 1) + -(-(context + tokens) // BLOCK) - len(shared))
        rows.append(row(i, context, tokens, (*shared, *own)))
    step = Step(1, tuple(rows))

    def places(i: int, start: int, stop: int) -> set[tuple[int, int]]:
        return {(rows[i].blocks[p // BLOCK], p % BLOCK) for p in range(start, stop)}

    written = set[tuple[int, int]]().union(*(places(r.key, r.context, r.context + len(r.tokens)) for r in rows))
    for launch in split_step(step, GUIDE):
        parts = [(i, rows[i].context + start, rows[i].context + stop) for i, start, stop in launch.parts(step)]
        if launch.bucket.stage is Stage.DECODE:  # every layer stores all rows before it attends
            written -= set[tuple[int, int]]().union(*(places(*p) for p in parts))
        for i, start, _ in parts:
            assert written.isdisjoint(places(i, 0, start)), "context that a later launch writes"
        written -= set[tuple[int, int]]().union(*(places(*p) for p in parts))
    assert not written


def test_a_batch_is_cut_where_one_launch_pads_more_than_a_second_costs() -> None:
    step = Step(1, tuple(row(i, 32 * BLOCK - 1, 1, range(32)) for i in range(65)))
    launches = split_step(step, GUIDE)
    whole = GUIDE.fit(Stage.DECODE, (65, 65 * 32))
    assert len(launches) == 2
    assert sum(GUIDE.policy.cost(launch.bucket) for launch in launches) < GUIDE.policy.cost(whole)


def test_a_ragged_device_runs_one_vision_launch_and_one_of_text() -> None:
    plan = make_plan(
        CUDA, ShapeLimits(8, 2048, 2048, 16, image_slots=4096), read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": "4096"})
    )
    images = tuple(
        Encode(str(i), (1, 32, 32), 1024, np.zeros((0, 1), np.uint8), np.zeros(0, np.int32)) for i in range(3)
    )
    assert [launch.items for launch in split_step(Step(1, (), images), plan)] == [(0, 1, 2)]
    rows = (row(0, 0, 40, block=16), row(1, 9, 1, block=16))
    text = split_step(Step(1, rows, images[:1]), plan)
    assert [launch.bucket.stage for launch in text] == [Stage.VISION, Stage.PREFILL]
    assert all(launch.bucket in plan.buckets for launch in text)


def test_order_on_the_device_and_images_in_one_launch() -> None:
    images = tuple(
        Encode(str(i), (1, 8, 8 * n), 64 * n, np.zeros((64 * n, 1), np.uint8), np.zeros(16 * n, np.int32))
        for i, n in enumerate((25, 25, 1, 2))
    )
    step = Step(1, (row(0, 0, 40),), images, tuple(Reset(i + 1, (1,), ()) for i in range(3)))
    launches = split_step(step, GUIDE)
    stages = [launch.bucket.stage for launch in launches]
    assert stages == sorted(stages, key=[Stage.RESET, Stage.VISION, Stage.FRESH].index)
    vision = [launch for launch in launches if launch.bucket.stage is Stage.VISION]
    assert [launch.items for launch in vision] == [(0, 1, 2, 3)]
    assert vision[0].bucket == GUIDE.fit(Stage.VISION, (53 * 64,))


@given(st.integers(0, 500), st.integers(2, 400), st.data())
@settings(max_examples=60, deadline=None)
def test_parts_of_a_row_are_the_row(context: int, tokens: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, tokens - 1))
    first = data.draw(st.integers(0, tokens - 1))
    arena = np.arange(2, 2 + data.draw(st.integers(1, tokens - first)), dtype=np.int32)
    base = row(0, context, tokens)
    whole = Row(**{**{f: getattr(base, f) for f in base.__slots__}, "images": (ImageRows(first, arena),),
                   "targets": np.arange(tokens, dtype=np.int32)})  # fmt: skip
    parts = [part_of(whole, 0, cut, BLOCK), part_of(whole, cut, tokens, BLOCK)]
    assert parts[1].context == context + cut and len(parts[0].blocks) == -(-(context + cut) // BLOCK)
    assert not parts[0].samples and parts[1].samples == whole.samples
    joined, x = text_inputs(parts, [5, 5 + cut]), text_inputs([whole], [5])
    for name in ("tokens", "positions", "image_row", "out_row", "from_slot"):
        assert np.array_equal(getattr(joined, name), getattr(x, name)), name
    assert [t for p in parts if p.targets is not None for t in p.targets] == list(range(tokens))


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that ``work`` runs: the same on any machine, however busy."""
    ran = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal ran
        ran += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return ran


def test_a_lookup_and_a_cut_are_cheap() -> None:
    """A hundred lines take less than 20 us, 25,000 less than 5 ms."""
    needs = [RowNeed(i, 37 * i, 1) for i in range(128)]
    assert lines_of(lambda: GUIDE.fit(Stage.DECODE, (77, 1234))) < 100
    assert 128 < lines_of(lambda: split_rows(needs, GUIDE)) < 25_000


@pytest.mark.long
def test_a_lookup_and_a_cut_take_microseconds_and_milliseconds() -> None:
    """Processor time of this thread, the least of ten: what else runs does not count."""

    def least(work: Callable[[], object], number: int) -> float:
        return min(timeit.repeat(work, timer=time.thread_time, number=number, repeat=10)) / number

    needs = [RowNeed(i, 37 * i, 1) for i in range(128)]
    assert least(lambda: GUIDE.fit(Stage.DECODE, (77, 1234)), 2000) < 20e-6
    assert least(lambda: split_rows(needs, GUIDE), 20) < 5e-3


def test_one_token_prompts_and_ends_decode() -> None:
    launches = split_step(Step(1, (row(0, 0, 1), row(1, 256, 1))), GUIDE)
    assert [(launch.bucket.stage, launch.items) for launch in launches] == [(Stage.DECODE, (0, 1))]
    assert launches[0].bucket == GUIDE.fit(Stage.DECODE, (2, 4))
    assert split_rows([RowNeed(0, 0, 1)], GUIDE)[0].bucket == GUIDE.fit(Stage.DECODE, (1, 1))


def test_sample_slices_stay_inside_the_plan() -> None:
    small, _ = plan_of("2048, one request")
    assert score_rows(small) == 1 and score_rows(GUIDE) == 64
    assert sample_bucket(70, True, GUIDE) == Bucket(Stage.SAMPLE, (128,), "full")
