"""Sizes, pixels and what lies in the arena, against transformers; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.altered_config import altered
from tests.oracles.transformers_model import make_image
from tests.vision.cross_attention.mllama_oracle import BASE, FIRST, FORMS, MllamaOracle
from tests.vision.family_harness import DEVICES, FamilyHarness, Shown
from trencadis import LLM
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import StartupError
from trencadis.core.models.image_cross_attention import CrossAttentionDecoder

BAR = 1e-5


def same_sizes(path: Path, count: int) -> None:
    from transformers.models.mllama import image_processing_pil_mllama as pil

    rng, ours = np.random.default_rng(5), image_processor(load_config(path), {})
    for _ in range(count):
        height = int(np.exp(rng.uniform(0, np.log(6000))))
        width = int(np.clip(height * np.exp(rng.uniform(-np.log(200), np.log(200))), -(-height // 200), 200 * height))
        tall, wide = pil.get_optimal_tiled_canvas(height, width, ours.max_image_tiles, ours.image)
        assert ours.choose_aspect_ratio(height, width) == (tall // ours.image, wide // ours.image), (height, width)
        want = pil.get_image_size_fit_to_canvas(height, width, tall, wide, ours.image)
        one = ours.compute_geometry(height, width)
        assert one.resized == tuple(map(int, want)), (height, width)
        assert (one.tokens, one.item.tokens) == (1, ours.max_image_tiles * (ours.rows_per_tile + 1))


def test_sizes_equal_the_processors(made: Any) -> None:
    for form in FORMS:
        same_sizes(made(form), 60)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_twenty_thousand_sizes(form: str, made: Any) -> None:
    same_sizes(made(form), 20_000)


def same_pixels(path: Path, reference: MllamaOracle, image: Any) -> None:
    ours = image_processor(load_config(path), {})
    given = reference.processor.image_processor(images=[[image]], return_tensors="np")
    one, channel = ours.prepare(image, "d"), np.repeat(np.arange(3), ours.patch**2)
    high, wide = (side * ours.patch // ours.image for side in one.grid[1:])
    assert ours.normalised_values.shape == (3, 256) and given["num_tiles"][0][0] == high * wide
    assert (
        given["aspect_ratio_mask"][0, 0].sum() == high * wide == one.layout[0].visible_rows // (ours.rows_per_tile + 1)
    )
    mine = ours.normalised_values[channel, one.pixels].reshape(high * wide, -1, ours.values)
    for tile, values in zip(mine, given["pixel_values"][0, 0], strict=False):
        assert (tile == ours.cut_patches(values.transpose(1, 2, 0))).all(), image.size


def test_pixels_equal_the_processors_bit_for_bit(path: Path, reference: Any) -> None:
    for seed in range(6):
        same_pixels(path, reference(FIRST), make_image(np.random.default_rng(seed), high=500))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_pixels_of_two_hundred_images(form: str, made: Any, reference: Any) -> None:
    for seed in range(200):
        same_pixels(made(form), reference(form), make_image(np.random.default_rng(seed), high=3000))


# The tower


def worst(
    path: Path, reference: MllamaOracle, harness: FamilyHarness, packings: int, seed: int, high: int = 400
) -> float:
    """The largest error of keys and values over launches of one to three images, padding poisoned."""
    rng, found, ours = np.random.default_rng(seed), 0.0, image_processor(load_config(path), {})
    for _ in range(packings):
        shown = []
        for _ in range(int(rng.integers(1, 4))):
            image = make_image(rng, high=high)
            one = ours.prepare(image, "d").items[0]
            shown.append(Shown(one.grid, one.slots, one.pixels, reference.keys_and_values(image)))
        found = max(found, harness.worst(shown, rng, 64 * int(rng.integers(0, 3))))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_of_images_equal_transformers(device: str, path: Path, reference: Any) -> None:
    assert worst(path, reference(FIRST), FamilyHarness(path, device, 1280, 9), 2, 1) <= BAR


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_two_hundred_images(form: str, device: str, made: Any, reference: Any) -> None:
    harness = FamilyHarness(made(form), device, 1280, 9)
    found = worst(made(form), reference(form), harness, 15 if device == "twin" else 100, 4, 3000)
    print(f"{form}, {device}: worst {found:.1e} of the largest value")
    assert found <= BAR


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_counted_exactly(form: str, made: Any) -> None:
    config = load_config(made(form))
    model = FamilyHarness(made(form), "cpu", 640, 9).model
    assert config.vision is not None
    assert 4 * config.vision.count_rank_weights(1) == model.nbytes() - CrossAttentionDecoder.nbytes(model)


# Refusals


@pytest.mark.parametrize(("file", "key", "value", "named"), [
    ("config.json", "text_config.model_type", "llama", "model_type"),
    ("config.json", "text_config.cross_attention_layers", [3, 1], "cross_attention_layers"),
    ("config.json", "text_config.cross_attention_layers", [0, 1], "cross_attention_layers"),
    ("config.json", "text_config.cross_attention_layers", [], "cross_attention_layers"),
    ("config.json", "text_config.num_key_value_heads", 3, "num_key_value_heads"),
    ("config.json", "vision_config.model_type", "clip_vision_model", "model_type"),
    ("config.json", "vision_config.vision_output_dim", 64, "vision_output_dim"),
    ("config.json", "vision_config.intermediate_layers_indices", [1, 9], "intermediate_layers_indices"),
    ("config.json", "vision_config.supported_aspect_ratios", [[1, 1]], "supported_aspect_ratios"),
    ("config.json", "vision_config.image_size", 57, "patch_size"),
    ("config.json", "image_token_index", 10**6, "image_token_index"),
    ("preprocessor_config.json", "max_image_tiles", 2, "max_image_tiles"),
    ("preprocessor_config.json", "do_pad", False, "do_pad"),
    ("preprocessor_config.json", "resample", 3, "resample"),
    ("preprocessor_config.json", "size", {"height": 56, "width": 112}, "width"),
    ("preprocessor_config.json", "image_processor_type", "CLIPImageProcessor", "image_processor_type"),
])  # fmt: skip
def test_a_value_that_is_not_implemented_is_refused(
    file: str, key: str, value: Any, named: str, path: Path, tmp_path: Path
) -> None:
    folder = altered(path, tmp_path / "altered", file, key, value)
    with pytest.raises(StartupError) as refused:
        image_processor(load_config(folder), {})
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("flags", "named"), [
    ({"pipeline_parallel_size": 2}, "pipeline stage"),
    ({"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}, "--mm-encoder-tp-mode data"),
    ({"batch_invariant": True}, "--batch-invariant"),
    ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
    ({"encoder_cache_images": 0}, "encoder-cache-images"),
])  # fmt: skip
def test_an_option_that_does_not_go_with_it_is_refused(flags: Any, named: str, path: Path) -> None:
    with pytest.raises(StartupError, match=named) as refused:
        LLM(str(path), **{**BASE, **flags}).close()
    assert "\n" not in str(refused.value)


def test_every_image_is_a_tile_of_the_plan(path: Path) -> None:
    needs = image_needs(load_config(path), {})
    assert (needs.slots, needs.tile, needs.tokens) == (192, 192, 68)
    with pytest.raises(StartupError, match="max_pixels does not apply"):
        image_needs(load_config(path), {"max_pixels": 50_000})
