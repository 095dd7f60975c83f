"""Sizes, token counts and rotary positions of random images and mixtures equal transformers'."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.patch_packing import count_slots, count_tokens, patch_grid
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import PreparedImage
from trencadis.multimodal.qwen2_vl.mrope import mrope_positions
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

SERVER = (784, 12845056)
IMAGE = 7
EMPTY = np.zeros((1, 1), np.uint8)
VISION = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
REFERENCE: Any = Qwen2_5_VLModel
MODEL: Any = SimpleNamespace(config=SimpleNamespace(vision_config=VISION))
MODEL.get_vision_position_ids = lambda *a, **k: REFERENCE.get_vision_position_ids(MODEL, *a, **k)


def sides(rng: random.Random, most: int = 9000) -> tuple[int, int]:
    """Log-uniform sides; thin images up to 200 : 1 now and then."""
    height = round(2 ** rng.uniform(0, np.log2(most)))
    spread = rng.choice((1.2, 4, 200))
    width = max(1, min(most * 2, round(height * spread ** rng.uniform(-1, 1))))
    return (height, width) if max(height, width) <= 200 * min(height, width) else (height, height)


def limits(rng: random.Random) -> tuple[int, int]:
    low, high = sorted(round(2 ** rng.uniform(10, 23.6)) for _ in range(2))
    return low, max(high, 112 * 112)


def test_twenty_thousand_sizes_and_token_counts() -> None:
    rng, expected = random.Random(11), Qwen2VLImageProcessorPil()
    servers = {f: Qwen2VLImageProcessor(*SERVER, alignment=a) for f, a in ((28, "pad"), (112, "resize"))}
    for case in range(20_000):
        factor = 28 if case % 4 else 112
        height, width = sides(rng)
        low, high = limits(rng) if case % 3 else SERVER
        ours = servers[factor]
        if (low, high) != SERVER:
            # The server's own limits, so that a thin image may exceed max_pixels as it does in the reference.
            ours = Qwen2VLImageProcessor(low, high, alignment=ours.alignment)
        got = ours.target_size(height, width)
        assert got == reference(height, width, factor, low, high), (height, width, factor, low, high)
        grid = patch_grid(*got)
        if case % 8 == 0:
            assert count_slots(grid) <= ours.largest_slots and count_tokens(grid) <= ours.largest_tokens
        if factor == 28 and case % 10 == 1:
            wanted = {"size": {"shortest_edge": low, "longest_edge": high}}
            patches = expected.get_number_of_image_patches(
                height, width, {**wanted, "min_pixels": low, "max_pixels": high}
            )
            assert count_tokens(grid) == patches // 4


def test_options_give_the_sizes_of_these_limits() -> None:
    rng, ours = random.Random(12), Qwen2VLImageProcessor(*SERVER)
    for _ in range(5000):
        low, high = limits(rng)
        height, width = sides(rng)
        try:
            got = ours.with_options(MediaOptions(min_pixels=low, max_pixels=high)).target_size(height, width)
        except Exception as error:
            assert "thin image" in str(error)
            continue
        assert got == reference(height, width, 28, low, high)


def mixture(rng: random.Random, ours: Qwen2VLImageProcessor) -> None:
    """A prompt of text and up to five images of any size, through sizes, placeholders and positions."""
    prepared, tokens, places, expected = [], [1] * rng.randint(1, 20), [], []
    for _ in range(rng.randint(0, 5)):
        height, width = sides(rng, 1500)
        resized = ours.target_size(height, width)
        expected.append(reference(height, width, 28, ours.min_pixels, ours.max_pixels))
        assert resized == expected[-1]
        grid = patch_grid(*resized)
        prepared.append(PreparedImage("d", EMPTY, grid, count_tokens(grid), count_slots(grid), resized))
        places.append(len(tokens))
        tokens += [IMAGE] + [1] * rng.randint(1, 9)  # the reference takes adjacent images for one
    expanded, spans = expand_placeholders(tokens, IMAGE, prepared, places)
    got, delta = mrope_positions(len(expanded), spans, 2)
    grids = [(1, h // 14, w // 14) for h, w in expected]
    kinds = torch.tensor([expanded]) == IMAGE
    assert int(kinds.sum()) == sum(h * w // 4 for _, h, w in grids)
    want, want_delta = REFERENCE.get_rope_index(
        MODEL, torch.tensor([expanded]), kinds.int(), torch.tensor(grids) if grids else None, None, None
    )
    assert np.array_equal(got, want[:, 0].numpy()) and delta == int(want_delta)


def test_positions_of_mixtures() -> None:
    rng, ours = random.Random(13), Qwen2VLImageProcessor(784, 784 * 200)
    for _ in range(250):
        mixture(rng, ours)


@pytest.mark.long
def test_positions_of_twenty_thousand_mixtures() -> None:
    rng = random.Random(14)
    servers = [Qwen2VLImageProcessor(784, 784 * n) for n in (40, 200, 900)]
    for _ in range(20_000):
        mixture(rng, rng.choice(servers))
    print("20000 mixtures of text and up to 5 images: counts and positions equal")
