"""Launches of the tower on the image trace, family by family: few slots stay empty, and no tile is encoded twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.packing import BARS, BLOCK, LENGTH, ROWS, TOKENS, Idle, drive, engine_of
from benchmarks.traces.generate import image_chat
from tests.vision.all_families.hub_configs import HUB, hub_config
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import DEFAULT_VISION_SLOTS, Stage
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import image_needs, image_sizes
from trencadis.core.request import Request, SamplingParams
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import PreparedImage
from trencadis.multimodal.vit.tile_image_processor import TileImageProcessor

CONCURRENT, WORD, IMAGE = 16, 5, 2
UNLIKE = ("Qwen2.5-VL-3B", "Qwen2-VL-2B", "Pixtral-12B", "Mistral-Small-3.1")
"""Images differ in their slots; those of the first fill whole windows."""
TILED = ("llava-v1.6-mistral-7b", "InternVL3-1B", "Idefics3-8B", "Phi-3.5-vision")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: hub_config(name, tmp_path_factory.mktemp("hub")))


def plan_of(config: ModelConfig) -> Plan:
    """Gaudi's plan with default buckets."""
    needs = image_needs(config, {})
    limits = ShapeLimits(
        ROWS, TOKENS, LENGTH, BLOCK, needs.slots, max(needs.least_slots, 1), needs.tile, needs.squares,
        units=CONCURRENT if config.text.cross_attention_layers else 0,
    )  # fmt: skip
    return make_plan(SERVING, limits, BucketOptions(), config)


def shown(sizes: Any, height: int, width: int, number: int) -> PreparedImage:
    """An image whose tiles are unlike all others'."""
    made = sizes(height, width)
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (made.grid[0] * (1 if made.layout else 0), 32), dtype=np.uint8)
    found: PreparedImage = made.make_prepared(pixels, f"{number:08x}", (height, width))
    return found


def request_of(name: str, images: Sequence[PreparedImage], prompt: int, output: int) -> Request:
    """Images as the family lays them out, before ``prompt`` words; texts of a layout count for three tokens each."""
    tokens = [WORD] * 16 + [IMAGE, WORD, WORD] * len(images) + [WORD] * prompt
    places = [16 + 3 * i for i in range(len(images))]
    tokens, spans = expand_placeholders(tokens, IMAGE, images, places, encode=lambda text: [WORD] * 3)
    return Request(name, tokens, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), spans)


def requests_of(sizes: Any, records: Sequence[dict[str, Any]], longest: int) -> Iterator[Request]:
    """The trace's requests."""
    number = 0
    for at, record in enumerate(records):
        images = []
        for width, height in record["images"]:
            images.append(shown(sizes, height, width, number))
            number += 1
        yield request_of(f"r{at}", images, int(record["prompt"]), min(int(record["output"]), longest))


def efficiency(config: ModelConfig, seed: int, count: int, longest: int) -> float:
    rank = Idle(plan_of(config))
    engine = engine_of(rank.plan, rank, bidirectional_images=config.text.bidirectional_images)
    drive(engine, requests_of(image_sizes(config, {}), list(image_chat(seed, count)), longest), CONCURRENT)
    assert rank.tally.images > count, "every item is encoded"
    return rank.tally.efficiency


@pytest.mark.parametrize("name", HUB)
def test_launches_at_sixteen_requests_are_filled(name: str, config: Any) -> None:
    """A share: answers of one token, so that the queue in front of the tower stays full."""
    found = efficiency(config(name), 11, 32, 1)
    print(f"{name}: needed / launched {found:.3f}")
    assert found >= BARS[CONCURRENT]


@pytest.mark.parametrize("name", UNLIKE)
def test_launches_beside_answers_are_filled(name: str, config: Any) -> None:
    """A share: whole answers, so that few images wait at a time, of any size."""
    found = efficiency(config(name), 22, 100, 1 << 20)
    print(f"{name}: needed / launched {found:.3f}")
    assert found >= BARS[CONCURRENT]


def test_sizes_in_wide_gaps_are_for_towers_without_windows(config: Any) -> None:
    for name in UNLIKE:
        listed = {size for size in plan_of(config(name)).sizes(Stage.VISION) if size <= DEFAULT_VISION_SLOTS[-1]}
        assert listed - set(DEFAULT_VISION_SLOTS) == (set() if name == UNLIKE[0] else {2240, 5120})


@pytest.mark.long
@pytest.mark.parametrize("name", HUB)
def test_launches_of_whole_traces_are_filled(name: str, config: Any) -> None:
    for longest, what in ((1 << 20, "whole answers"), (1, "first token only")):
        every = [efficiency(config(name), seed, 400, longest) for seed in range(20, 25)]
        print(f"\n{name}, {what}: needed / launched {min(every):.3f} to {max(every):.3f} on 5 seeds")
        assert min(every) >= BARS[CONCURRENT]


@pytest.mark.parametrize("name", TILED)
def test_tiles_that_two_images_share_are_encoded_once(name: str, config: Any) -> None:
    """The second image differs in its first tile, and so in the tile that shows all of it."""
    made: TileImageProcessor = image_sizes(config(name), {}).__self__  # type: ignore[attr-defined]
    height, width = made.compute_geometry(*made.compute_geometry(2 * made.image, 3 * made.image).resized).resized
    first = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    second = first.copy()
    second[: made.image, : made.image] ^= 0xFF
    images = [made.prepare(Image.fromarray(pixels), str(i)) for i, pixels in enumerate((first, second))]
    count, keys = len(images[0].items), [[item.digest for item in one.items] for one in images]
    assert count >= 3 and len({*keys[0], *keys[1]}) == count + 2
    encoded: list[str] = []
    rank = Idle(plan_of(config(name)), lambda step: encoded.extend(one.digest for one in step.images))
    engine = engine_of(rank.plan, rank)
    drive(engine, iter([request_of(f"r{i}", [one], 9, 2) for i, one in enumerate(images)]), CONCURRENT)
    assert len(encoded) == len(set(encoded)) == count + 2
