"""Which images share a launch, and what comes of it on the image trace."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing import BARS, LAUNCH_BAR, default_plan, measure
from trencadis.backends.cpu.shape_policy import PADDED
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Stage
from trencadis.core.scheduling.encoder_scheduler import ImagePacker, first_fit
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_5_vl.window_packing import pack_windows, window_layout

plan = cache(default_plan)
windows = st.lists(st.integers(1, 240).map(lambda n: 64 * n), min_size=1, max_size=40)


@settings(deadline=None)
@given(windows)
def test_the_oldest_is_taken_and_the_bucket_holds_them(needs: list[int]) -> None:
    chosen = ImagePacker(plan()).choose(needs)
    assert chosen[0] == 0 and chosen == sorted(set(chosen))
    total = sum(needs[i] for i in chosen)
    assert total <= 12544 or plan().fit(Stage.VISION, (total,)) == plan().fit(Stage.VISION, (needs[0],))
    assert plan().is_within_boundaries(Stage.VISION, (total,))


@settings(deadline=None)
@given(windows)
def test_no_bucket_would_have_cost_less_per_slot(needs: list[int]) -> None:
    """Among first-fit fillings of the planned sizes within the budget; a launch brings a step with it."""
    p, step = plan(), min(plan().policy.cost(b) for b in plan().of(Stage.DECODE))

    def per_slot(chosen: list[int]) -> float:
        total = sum(needs[i] for i in chosen)
        return (p.policy.cost(p.fit(Stage.VISION, (total,))) + step) / total

    fitting = [s for s in p.sizes(Stage.VISION) if needs[0] <= s <= 12544]
    best = min((per_slot(first_fit(needs, s)) for s in fitting), default=float("inf"))
    assert per_slot(ImagePacker(p).choose(needs)) <= best * (1 + 1e-9)


def test_all_are_launched_once_in_few_launches() -> None:
    """Draining a queue of the ten sizes of the trace."""
    needs = [256, 576, 1024, 1600, 1920, 3072, 4480, 5376, 6912, 11520] * 3
    left, launches, launched = list(range(30)), 0, 0
    while left:
        chosen = ImagePacker(plan()).choose([needs[i] for i in left])
        launched += plan().fit(Stage.VISION, (sum(needs[left[i]] for i in chosen),)).dims[0]
        left = [n for i, n in enumerate(left) if i not in chosen]
        launches += 1
    print(f"{launches} launches for 30 images, needed / launched {sum(needs) / launched:.3f}")
    assert launches <= 12 and sum(needs) / launched >= 0.9


def test_above_a_users_list_images_run_alone_at_escape_shapes() -> None:
    limits = ShapeLimits(8, 2048, 4096, 128, 62208)
    requested = make_plan(plan().policy, limits, BucketOptions(vision=(256, 1024)))
    packer = ImagePacker(requested)
    assert packer.choose([1088, 64, 64]) == [0] and not requested.is_within_boundaries(Stage.VISION, (1088,))
    assert packer.choose([512, 1088, 512, 64]) == [0, 2]
    shapes = {requested.fit(Stage.VISION, (n,)).dims[0] for n in range(1088, 62208 + 1, 64)}
    assert len(shapes) <= 8 * 6 and all(s % 64 == 0 for s in shapes)


def test_where_nothing_is_planned() -> None:
    """On a device that compiles shapes every image keeps its own; elsewhere sizes are free up to the budget."""
    bare = make_plan(plan().policy, ShapeLimits(8, 2048, 4096, 128, 4096), BucketOptions(pad_vision=False))
    assert ImagePacker(bare).choose([64, 64, 64]) == [0]
    ragged = Plan(dataclasses.replace(PADDED, boundaries={}))
    assert ImagePacker(ragged, budget=256).choose([128, 192, 64, 64]) == [0, 2, 3]
    assert ImagePacker(ragged, budget=256).choose([1024, 64]) == [0]
    assert ImagePacker(Plan(PADDED)).choose([1024, 64, 512]) == [0, 1, 2]


def test_a_large_image_is_filled_up() -> None:
    big = 13_000 // 64 * 64
    bucket = plan().fit(Stage.VISION, (big,)).dims[0]
    assert bucket > 12544 and ImagePacker(plan()).choose([big, bucket - big]) == [0, 1]


@pytest.mark.parametrize("concurrent", BARS)
def test_the_image_trace(concurrent: int) -> None:
    """16 requests at the encoder: answers of one token, so that the queue in front of it stays full."""
    t = measure(concurrent, 120, 11, plan(), longest=1)
    print(f"{concurrent}: needed/launched {t.efficiency:.3f}, {t.launches} launches for {t.images} images")
    assert t.efficiency >= BARS[concurrent]
    assert t.share <= (LAUNCH_BAR if concurrent == 16 else 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 30))
def test_the_image_trace_on_many_seeds(seed: int) -> None:
    for concurrent, bar in BARS.items():
        whole, first = (measure(concurrent, 400, seed, plan(), longest) for longest in (1 << 20, 1))
        assert min(whole.efficiency, first.efficiency) >= bar
        assert first.share <= (LAUNCH_BAR if concurrent == 16 else 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=4), st.integers(0, 3))
def test_every_patch_has_one_slot_and_every_token_one_row(cells: list[tuple[int, int]], spare: int) -> None:
    images, row = [], 2
    for i, (h, w) in enumerate(cells):
        grid = (1, 2 * h, 2 * w)
        pixels = np.full((4 * h * w, 4), i + 1, np.uint8)
        pixels[:, 1] = np.arange(4 * h * w) % 256
        images.append(Encode(str(i), grid, count_slots(grid), pixels, np.arange(row, row + h * w, dtype=np.int32)))
        row += h * w
    x = pack_windows(images, sum(i.slots for i in images) + 64 * spare)
    real = np.arange(len(x.pixels)) % 64 < np.repeat(x.count, 64)
    at = 0
    for i, image in enumerate(images):
        mine = slice(at, at + image.slots)
        assert real[mine].sum() == len(image.pixels) and (x.pixels[mine][real[mine]][:, 0] == i + 1).all()
        order = window_layout(image.grid[1], image.grid[2]).patch
        assert sorted(order[order >= 0].tolist()) == list(range(len(image.pixels)))
        rows = x.rows[at // 4 : (at + image.slots) // 4]
        assert sorted(rows[rows > 1].tolist()) == image.rows.tolist()
        at += image.slots
    assert (x.rows[at // 4 :] == 1).all() and len(set(x.segment.tolist())) == len(images) + spare
    assert (np.diff(x.segment) >= 0).all()
