"""Rotary positions against the reference model's, on random mixtures."""

import random

import numpy as np
import pytest

from tests.oracles.rotary_positions import reference
from trencadis.core.media_spans import MediaSpan
from trencadis.multimodal.qwen2_vl.mrope import mrope_positions


def mixture(rng, images, video=False):
    kinds, spans, seconds = [0] * rng.randint(1, 30), [], []
    for _ in range(images):
        moving = video and rng.random() < 0.6
        grid = (rng.randint(1, 6) if moving else 1, 2 * rng.randint(1, 20), 2 * rng.randint(1, 20))
        length = grid[0] * grid[1] * grid[2] // 4
        spans.append(MediaSpan(len(kinds), length, "d", grid, 64))
        seconds.append(rng.choice([0.3, 0.5, 1.0, 1.7, 2.0]) if moving else None)
        kinds += [2 if moving else 1] * length + [0] * rng.randint(1, 12)
    while video and kinds[-1] == 0 and rng.random() < 0.5:
        kinds.pop()
    return kinds, spans, seconds


@pytest.mark.parametrize("images", range(5))
@pytest.mark.parametrize("video", [False, True])
def test_equals_the_reference(images, video):
    rng = random.Random(images + 10 * video)
    for _ in range(12):
        kinds, spans, seconds = mixture(rng, images, video)
        rate = rng.choice([2, 4, 25])
        got, delta = mrope_positions(len(kinds), spans, rate, second_per_grid=seconds)
        want, want_delta = reference(kinds, [s.grid for s in spans], seconds, rate)
        assert got.dtype == np.int32 and got.shape == (3, len(kinds))
        assert np.array_equal(got, want) and delta == want_delta


def test_images_at_both_ends():
    spans = [MediaSpan(0, 6, "a", (1, 4, 6), 64), MediaSpan(7, 4, "b", (1, 8, 2), 64)]
    got, delta = mrope_positions(11, spans, 2.0)
    want, want_delta = reference([1] * 6 + [0] + [1] * 4, [s.grid for s in spans], [None, None], 2)
    assert np.array_equal(got, want) and delta == want_delta == -3


def test_text_alone_counts_up():
    got, delta = mrope_positions(5, [], 2.0)
    assert delta == 0 and np.array_equal(got, np.tile(np.arange(5), (3, 1)))


@pytest.mark.parametrize(
    "spans",
    [
        [MediaSpan(0, 5, "", (1, 4, 4), 64)],
        [MediaSpan(8, 4, "", (1, 4, 4), 64)],
        [MediaSpan(0, 4, "", (1, 4, 4), 64), MediaSpan(3, 4, "", (1, 4, 4), 64)],
    ],
)
def test_spans_that_do_not_fit_are_refused(spans):
    with pytest.raises(ValueError, match="span"):
        mrope_positions(10, spans, 2.0)
