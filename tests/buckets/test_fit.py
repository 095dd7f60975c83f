"""The plan's one lookup, and cutting a Step into launches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.core.bucket_lookup import Plan, escape
from trencadis.core.buckets import DEFAULT_VISION_SLOTS, Bucket, Stage
from trencadis.core.device_shape_policy import Policy
from trencadis.core.launches.host_inputs import SampleRow, head_inputs, reset_inputs, text_inputs
from trencadis.core.launches.launch_splitter import split_step
from trencadis.core.shapes.bucket_options import vision_boundaries
from trencadis.core.step import PENDING, Bias, Encode, ImageRows, Reset, Row, Sample, Step
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

POLICY = Policy(
    axes={
        Stage.PREFILL: ("tokens", "rows"),
        Stage.DECODE: ("rows",),
        Stage.VISION: ("slots",),
        Stage.SAMPLE: ("rows",),
        Stage.RESET: ("rows",),
    },
    alignment={Stage.PREFILL: (16, 4), Stage.DECODE: (4,), Stage.VISION: (64,), Stage.SAMPLE: (4,), Stage.RESET: (4,)},
    boundaries={Stage.VISION: (DEFAULT_VISION_SLOTS,)},
)
PLAN = Plan(POLICY)


@given(st.integers(1, 20_000), st.integers(1, 600))
def test_fit_dominates_and_is_least(tokens: int, rows: int) -> None:
    bucket = PLAN.fit(Stage.PREFILL, (tokens, rows))
    assert bucket.dims[0] - 16 < tokens <= bucket.dims[0] and bucket.dims[0] % 16 == 0
    assert bucket.dims[1] - 4 < rows <= bucket.dims[1]


@given(st.integers(1, 400_000))
def test_vision_needs_take_the_next_listed_size_or_an_escape(windows: int) -> None:
    slots = 64 * windows
    size = PLAN.fit(Stage.VISION, (slots,)).dims[0]
    assert size >= slots and size % 64 == 0
    if slots <= DEFAULT_VISION_SLOTS[-1]:
        assert size == min(s for s in DEFAULT_VISION_SLOTS if s >= slots)
    else:
        assert size < slots * 1.126 and not PLAN.is_within_boundaries(Stage.VISION, (slots,))


def test_escape_shapes_are_few() -> None:
    assert len({escape(n, 64) for n in range(12_545, 100_000)}) <= 8 * 3 + 1


@given(st.integers(64, 1_000_000), st.booleans())
def test_vision_list_covers_the_largest_need(largest: int, windows: bool) -> None:
    sizes = vision_boundaries(largest, windows)
    assert sizes[-1] >= largest and all(s % 64 == 0 for s in sizes) and list(sizes) == sorted(set(sizes))
    assert {1600, 3136, 4096, 6400, 7744, 9216, 12544} <= set(sizes)


def test_a_tower_without_windows_has_a_size_in_each_wide_gap() -> None:
    """Its images need any multiple of 64; the list's sizes are squares of whole windows."""
    assert vision_boundaries(12544) == DEFAULT_VISION_SLOTS
    assert set(vision_boundaries(12544, windows=False)) - set(DEFAULT_VISION_SLOTS) == {40 * 56, 64 * 80}
    sizes = vision_boundaries(100_000, windows=False)
    assert all(b - a <= 1024 or 2 * b <= 3 * a + 2 * 64 for a, b in pairwise(sizes))


def test_a_bucket_prints_and_sorts() -> None:
    assert str(Bucket(Stage.PREFILL, (64, 4))) == "prefill[64x4]"
    assert str(Bucket(Stage.SAMPLE, (4,), "full")) == "sample[4]/full"
    with pytest.raises(ValueError, match="axes"):
        PLAN.fit(Stage.DECODE, (1, 2))


def row(key: int, slot: int, context: int, tokens: tuple[int, ...], images: tuple[ImageRows, ...] = ()) -> Row:
    positions = np.broadcast_to(np.arange(context, context + len(tokens), dtype=np.int32), (3, len(tokens)))
    return Row(key, slot, context, tokens, tuple(range(2, 3 + (context + len(tokens)) // 16)), positions, images)


def test_split_in_device_order() -> None:
    image = Encode("d", (1, 2, 2), 64, np.zeros((4, PATCH_VALUES), np.uint8), np.array([2], np.int32))
    step = Step(1, (row(1, 1, 0, (5, 6)), row(2, 2, 9, (7,))), (image,), (Reset(1, (5,), ()),))
    stages = [launch.bucket for launch in split_step(step, PLAN)]
    assert stages == [Bucket(Stage.RESET, (4,)), Bucket(Stage.VISION, (256,)), Bucket(Stage.PREFILL, (16, 4))]
    decode = Step(2, (row(1, 1, 3, (5,)), row(2, 2, 9, (7,))))
    assert [launch.bucket for launch in split_step(decode, PLAN)] == [Bucket(Stage.DECODE, (4,))]


def test_text_inputs_lay_rows_out() -> None:
    rows = [row(1, 3, 20, (5, PENDING)), row(2, 4, 0, (8, 9, 9), (ImageRows(1, np.array([7, 8], np.int32)),))]
    x = text_inputs(rows)
    assert x.tokens.tolist() == [5, 0, 8, 9, 9] and x.from_slot.tolist() == [0, 3, 0, 0, 0]
    assert x.image_row.tolist() == [0, 0, 0, 7, 8] and x.row_start.tolist() == [0, 2, 5]
    assert x.positions[0].tolist() == [20, 21, 0, 1, 2] and x.context.tolist() == [20, 0]
    assert x.blocks.tolist() == [[2, 3], [2, 0]] and x.out_row.tolist() == [1, 2, 3, 4, 5]


def test_masks_ban_exactly_what_is_banned() -> None:
    x = head_inputs([SampleRow(i, i, Sample(banned=b)) for i, b in ((1, ()), (2, (0, 9)), (3, (0, 9)))], 20)
    assert x.mask_row.tolist() == [0, 1, 1] and x.masks.shape == (2, 3)
    allowed = np.unpackbits(x.masks, axis=1, bitorder="little")[:, :20]
    assert allowed[0].all() and np.flatnonzero(allowed[1] == 0).tolist() == [0, 9]


def test_reset_holds_whole_rows() -> None:
    x = reset_inputs([Reset(5, (1, 1, 17), (3, 3), (Bias(9, 0.0), Bias(4, -1.5)))], 20)
    assert x.counts[0].tolist() == [0, 0, 0, 2] + [0] * 16
    assert np.flatnonzero(np.unpackbits(x.prompt_mask[0], bitorder="little")).tolist() == [1, 17]
    # A kernel takes a first value of 0 for a row without a bias.
    assert x.bias_id[0, 0] == 4 and x.bias_value[0, 0] == -1.5 and not x.bias_value[0, 1:].any()
