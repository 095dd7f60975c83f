"""Work items of attention to images: every span of every block once, in the room that the planner counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.cross_attention.cross_attention_cases import CrossAttentionCase
from tests.traffic.ragged_rows import ragged_inputs
from trencadis.backends.cuda import runtime_of
from trencadis.backends.cuda.kernels import cross_attend
from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import IMAGE_SPAN
from trencadis.backends.cuda.launches.attention_work_items import (
    CrossAttentionItemArrays,
    LaunchPlans,
    plan_cross_items,
)
from trencadis.backends.cuda.launches.bucket_capacity import (
    cross_attention_block_tokens,
    cross_attention_bytes,
    cross_attention_capacity,
    input_bytes,
)
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.cross_attention_inputs import VARIANT
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.models.image_cross_attention import arena_row_numbers
from trencadis.core.vision_config import SlotForm

LENGTH = 6404
"""Arena rows of an image of the 11B."""


def drawn(rng: np.random.Generator) -> tuple[Bucket, np.ndarray, int, int, int]:
    """(bucket, rows that its tokens see, query heads of a KV head, processors, KV heads)."""
    decode, units = bool(rng.integers(2)), int(rng.choice((1, 4, 16)))
    tokens = int(rng.integers(1, 65 if decode else 2049))
    variant = f"{VARIANT}{units}"
    bucket = Bucket(Stage.DECODE, (tokens,), variant) if decode else Bucket(Stage.PREFILL, (tokens, 8), variant)
    reach = np.zeros((tokens, units), np.int32)
    for begin in range(0, tokens, int(rng.integers(1, 400))):  # requests, most of which see an image or two
        for unit in rng.integers(0, units, int(rng.integers(0, 3))):
            reach[begin:, :] = 0
            reach[begin:, unit] = int(rng.choice((1601, 3202, LENGTH)))
    return bucket, reach, int(rng.choice((4, 8, 16))), int(rng.choice((16, 108, 132))), int(rng.choice((1, 2, 8)))


def spans_of(reach: np.ndarray, each: int) -> dict[int, list[tuple[int, int]]]:
    """(image, first row) of the spans of each block, by its first token."""
    found = {}
    for first in range(0, len(reach), each):
        far = reach[first : first + each].max(0)
        found[first] = [(u, begin) for u, rows in enumerate(far.tolist()) for begin in range(0, rows, IMAGE_SPAN)]
    return found


def planned_spans(made: CrossAttentionItemArrays, reach: np.ndarray, each: int) -> dict[int, list[tuple[int, int]]]:
    """The same, as the kernels would go through them."""
    wanted, got, results = spans_of(reach, each), {}, {}
    columns = (made.cross_token, made.cross_unit, made.cross_last, made.cross_begin, made.cross_part)
    for token, unit, last, begin, part in zip(*(c.tolist() for c in columns), strict=True):
        if token >= 0 and part >= 0:
            assert last == unit + 1 and part not in results
            results[part] = token, unit, begin
        elif token >= 0:
            assert token not in got and begin == 0
            got[token] = [span for span in wanted[token] if unit <= span[0] < last]
    for i, token in enumerate(made.merge_token.tolist()):
        if token >= 0:
            assert token not in got
            parts = range(*made.merge_part[i : i + 2].tolist())
            assert len(parts) > 1 and all(results[p][0] == token for p in parts)
            got[token] = [results.pop(p)[1:] for p in parts]
    assert not results, "partial results that nobody joins"
    return got


@pytest.mark.parametrize("seed", range(40))
def test_every_span_is_attended_to_once(seed: int) -> None:
    bucket, reach, group, processors, heads = drawn(np.random.default_rng(seed))
    each, room = (
        cross_attention_block_tokens(bucket, group),
        cross_attention_capacity(bucket, group, processors, heads, LENGTH),
    )
    made = plan_cross_items(reach, each, room)
    assert planned_spans(made, reach, each) == spans_of(reach, each)
    assert len(made.cross_token) == room.items and len(made.merge_token) == room.joins
    assert made.merge_part.max() <= room.parts


def test_one_decoding_row_keeps_a_card_busy() -> None:
    """Of 13 spans of an image each is an item of its own, for each of 8 KV heads; many rows are cut no further."""
    bucket = Bucket(Stage.DECODE, (1,), f"{VARIANT}1")
    made = plan_cross_items(np.full((1, 1), LENGTH, np.int32), 4, cross_attention_capacity(bucket, 4, 132, 8, LENGTH))
    assert (made.cross_part >= 0).sum() == 13
    many = Bucket(Stage.PREFILL, (2048, 4), f"{VARIANT}1")
    made = plan_cross_items(np.full((2048, 1), LENGTH, np.int32), 16, cross_attention_capacity(many, 4, 132, 8, LENGTH))
    work = np.where(made.cross_part >= 0, 1, 13)[made.cross_token >= 0]
    assert work.sum() == 128 * 13 and (work[:-1] >= work[1:]).all()


def test_the_planner_counts_inputs_and_partial_results() -> None:
    for decode in (False, True):
        for spare in (0, 3):
            case = CrossAttentionCase(
                ((6404, 0),) * 5, decode=decode, length=LENGTH, spare=(2, spare), processors=132, group=4
            )
            buffers = InputBuffers(case.bucket, case.sizes, runtime_of(torch.device("cpu")))
            planned = InputSizes(
                50, 16, 8, case.kv_heads, SlotForm(1, 1, cross_attention_rows=LENGTH), group=case.group, head_dim=case.d
            )
            assert input_bytes(case.bucket, planned, processors=132) == buffers.bytes
            q = torch.zeros(case.bucket.dims[0], case.group * case.kv_heads, case.d)
            room = cross_attend.span_results(buffers.tensors.cross_attention, q, case.kv_heads)
            assert cross_attention_bytes(case.bucket, planned, processors=132) == sum(t.nbytes for t in room)
    plain = replace(case.bucket, variant="")
    assert (
        cross_attention_bytes(plain, planned) == 0
        and InputBuffers(plain, case.sizes, buffers.buffer.runtime).tensors.cross_attention is None
    )


def test_a_plan_serves_until_a_token_sees_something_else() -> None:
    plans, room = (
        LaunchPlans().cross_attention,
        cross_attention_capacity(Bucket(Stage.DECODE, (2,), f"{VARIANT}1"), 4, 132, 8, LENGTH),
    )
    reach = np.array([[3000], [0]], np.int32)
    kept = plans.of(reach, 4, room)
    assert plans.of(reach.copy(), 4, room) is kept and plans.made == 1
    reach[1] = 10
    assert plans.of(reach, 4, room) is not kept and plans.made == 2


def test_images_of_the_arena_begin_where_the_encoder_wrote_them() -> None:
    """As the numbers of rows that devices without such a kernel gather."""
    case = CrossAttentionCase(((5, 9),), units=(3, 1), length=10, spare=(0, 0))
    buffers = InputBuffers(case.bucket, case.sizes, runtime_of(torch.device("cpu")))
    assert buffers.tensors.cross_attention.unit_row.tolist() == [2, 2]
    inputs = replace(ragged_inputs([(0, 1)], 16, np.random.default_rng(0)), cross_attention=case.visible)
    buffers.fill(inputs)
    assert (
        buffers.tensors.cross_attention.unit_row.tolist() == arena_row_numbers(torch.tensor([3, 1]), 10)[::10].tolist()
    )
