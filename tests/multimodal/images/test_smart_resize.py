"""Sizes against the reference processor's, golden token counts and slot bounds."""

import math
import random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

from trencadis.core.errors import BadRequest
from trencadis.multimodal.patch_packing import count_slots, count_tokens, patch_grid
from trencadis.multimodal.qwen2_vl.smart_resize import largest_slots, smart_resize

GOLDEN = {
    (28, 28): 4,
    (27, 27): 4,
    (30, 20): 6,
    (100, 100): 16,
    (112, 112): 16,
    (224, 224): 64,
    (240, 240): 81,
    (448, 448): 256,
    (1280, 720): 1196,
    (10, 2000): 29,
    (13, 1000): 18,
    (14, 300): 10,
    (640, 480): 391,
    (1920, 1080): 2691,
    (4000, 4000): 16384,
}

side = st.one_of(st.integers(1, 60), st.integers(1, 5000), st.integers(1, 200_000))
limits = st.tuples(st.integers(1, 500_000), st.integers(784, 20_000_000)).map(lambda p: (min(p), max(*p, 784)))


@pytest.mark.parametrize(("size", "tokens"), GOLDEN.items())
def test_golden_token_counts(size, tokens):
    width, height = size
    assert count_tokens(patch_grid(*smart_resize(height, width))) == tokens


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_equals_the_reference(count):
    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(side, side, st.sampled_from([28, 32, 112]), limits)
    @example(42, 70, 28, (3136, 12845056))
    @example(14, 14, 28, (1, 784))
    def run(height, width, factor, bounds):
        same_as_the_reference(height, width, factor, bounds)

    run()


def same_as_the_reference(height, width, factor, bounds):
    assume(max(height, width) <= 200 * min(height, width))
    ours = smart_resize(height, width, factor, *bounds)
    assert ours == reference(height, width, factor, *bounds)
    assert min(ours) >= factor and ours[0] % factor == ours[1] % factor == 0


def test_every_small_size_equals_the_reference():
    for height in range(1, 57):
        for width in range(1, 57):
            assert smart_resize(height, width) == reference(height, width, 28, 3136, 12845056)


def test_never_zero_even_without_a_minimum():
    assert smart_resize(10, 100, 28, 0, 12845056) == (28, 112)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2001), (0, 5), (5, 0), (0, 0), (65535, 1)])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(BadRequest):
        smart_resize(*size)


def test_aspect_of_exactly_200_is_accepted():
    assert smart_resize(1, 200) == reference(1, 200, 28, 3136, 12845056)


def test_slots_own_whole_windows():
    assert count_slots((1, 2, 2)) == 64
    assert count_slots((1, 8, 8)) == 64
    assert count_slots((1, 10, 8)) == 128
    assert count_slots((3, 16, 18)) == 3 * 2 * 3 * 64
    assert count_slots(patch_grid(*smart_resize(3000, 4000))) == 62208
    assert count_slots(patch_grid(*smart_resize(630, 640, min_pixels=401408))) >= 2048


@pytest.mark.parametrize(("low", "high"), [(3136, 12845056), (3136, 1003520), (401408, 401408), (784, 784), (1, 2000)])
@pytest.mark.parametrize("factor", [28, 112])
def test_largest_slots_is_a_bound_and_is_nearly_reached(low, high, factor):
    bound = largest_slots(low, high, factor)
    rng = random.Random(0)
    reached = 0
    for _ in range(4000):
        height = rng.randint(1, 3000)
        width = max(1, min(math.ceil(height * rng.uniform(1, 200)), 200 * height))
        reached = max(reached, count_slots(patch_grid(*smart_resize(height, width, factor, low, high))))
    assert reached <= bound <= 4 * reached
