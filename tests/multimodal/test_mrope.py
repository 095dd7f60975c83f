"""Rotary positions against the reference model's, on random mixtures."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from trencadis.core.request import MediaSpan
from trencadis.multimodal.mrope import positions


def reference(kinds, grids, seconds, tokens_per_second):
    """kinds: int per token, 0 text, 1 image, 2 video."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=tokens_per_second)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(model, *a, **k)
    of = {1: [], 2: []}
    for grid, second in zip(grids, seconds, strict=True):
        of[1 if second is None else 2].append(grid)
    given = [s for s in seconds if s is not None]
    ids, delta = Qwen2_5_VLModel.get_rope_index(
        model,
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(of[1]) if of[1] else None,
        torch.tensor(of[2]) if of[2] else None,
        torch.tensor(given) if given else None,
    )
    return ids[:, 0].numpy(), int(delta)


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
        got, delta = positions(len(kinds), spans, rate, second_per_grid=seconds)
        want, want_delta = reference(kinds, [s.grid for s in spans], seconds, rate)
        assert got.dtype == np.int32 and got.shape == (3, len(kinds))
        assert np.array_equal(got, want) and delta == want_delta


def test_pictures_at_both_ends():
    spans = [MediaSpan(0, 6, "a", (1, 4, 6), 64), MediaSpan(7, 4, "b", (1, 8, 2), 64)]
    got, delta = positions(11, spans, 2.0)
    want, want_delta = reference([1] * 6 + [0] + [1] * 4, [s.grid for s in spans], [None, None], 2)
    assert np.array_equal(got, want) and delta == want_delta == -3


def test_text_alone_counts_up():
    got, delta = positions(5, [], 2.0)
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
        positions(10, spans, 2.0)
