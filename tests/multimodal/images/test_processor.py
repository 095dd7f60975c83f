"""Pixels bit for bit against the reference PIL processor."""

import json
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trencadis.core.errors import BadRequest, StartupError
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

LIMITS: Any = {"min_pixels": 3136, "max_pixels": 1003520}
rng = random.Random(7)
SIZES = [(rng.randint(28, 700), rng.randint(28, 700)) for _ in range(26)] + [
    (1, 1), (10, 2000), (2000, 10), (1, 200), (200, 1), (27, 27), (28, 28), (112, 112), (1500, 1500), (1499, 31),
    (29, 1500), (1003, 1499), (3, 2), (56, 56),
]  # fmt: skip


def random_image(width, height, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


@pytest.fixture(scope="module")
def oracle():
    return Qwen2VLImageProcessorPil(**LIMITS)


@pytest.fixture
def folder(tmp_path):
    def write(raw, name="preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(raw))
        return tmp_path

    return write


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_equal_the_reference(oracle, size):
    image = random_image(size[0], size[1], seed=sum(size))
    ours = Qwen2VLImageProcessor(**LIMITS)
    got = ours.prepare(image, "d")
    want = oracle(image, return_tensors="np")
    assert got.pixels.dtype == np.uint8 and got.pixels.shape == (got.grid[1] * got.grid[2], 1176)
    assert got.pixels.flags.c_contiguous
    assert list(got.grid) == want["image_grid_thw"][0].tolist()
    assert got.tokens == len(got.pixels) // 4
    assert got.resized == (got.grid[1] * 14, got.grid[2] * 14)
    channel = np.arange(1176) // (2 * 14 * 14)
    normalised = ours.normalised_values[channel[None], got.pixels]
    assert normalised.dtype == want["pixel_values"].dtype == np.float32
    assert np.array_equal(normalised, want["pixel_values"])


def test_table_is_the_formula_of_the_docstring():
    ours = Qwen2VLImageProcessor(**LIMITS)
    x = np.arange(256)
    for c in range(3):
        scaled = (x * ours.rescale).astype(np.float32)
        want = (scaled - np.float32(ours.mean[c])) / np.float32(ours.std[c])
        assert np.array_equal(ours.normalised_values[c], want)


def test_reads_the_layouts_of_hub_and_reference(folder, oracle, tmp_path):
    hub = folder({"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "image_mean": [0.1, 0.2, 0.3]})
    got = Qwen2VLImageProcessor.from_checkpoint(hub, {})
    assert (got.min_pixels, got.max_pixels, got.mean) == (3136, 12845056, (0.1, 0.2, 0.3))
    oracle.save_pretrained(tmp_path)
    assert Qwen2VLImageProcessor.from_checkpoint(tmp_path, {}) == Qwen2VLImageProcessor(**LIMITS)
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "old.json")
    raw = json.loads((tmp_path / "old.json").read_text())
    nested = folder({"image_processor": raw}, "processor_config.json")
    assert Qwen2VLImageProcessor.from_checkpoint(nested, {}) == Qwen2VLImageProcessor(**LIMITS)


def test_kwargs_override_and_agree_with_the_reference(folder):
    path = folder({"size": {"shortest_edge": 3136, "longest_edge": 12845056}})
    ours = Qwen2VLImageProcessor.from_checkpoint(path, {"max_pixels": 40000})
    assert (ours.min_pixels, ours.max_pixels) == (3136, 40000)
    image = random_image(640, 480)
    want = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=40000)(image, return_tensors="np")
    assert list(ours.prepare(image, "").grid) == want["image_grid_thw"][0].tolist()


@pytest.mark.parametrize(
    ("raw", "kwargs"),
    [
        (None, {}),
        ({"size": {}}, {}),
        ({"min_pixels": "many", "max_pixels": 1000}, {}),
        ({"min_pixels": 3136, "max_pixels": 12845056, "image_mean": [1]}, {}),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {"frames_per_minute": 2}),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {"min_pixels": 0}),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {"max_pixels": 100}),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {"min_pixels": 1, "max_pixels": 783}),
    ],
)
def test_wrong_configuration_ends_start_up(folder, tmp_path, raw, kwargs):
    path = tmp_path if raw is None else folder(raw)
    with pytest.raises(StartupError):
        Qwen2VLImageProcessor.from_checkpoint(path, kwargs)


def test_resize_alignment_gives_whole_windows(folder):
    path = folder({"min_pixels": 3136, "max_pixels": 12845056})
    ours = Qwen2VLImageProcessor.from_checkpoint(path, {}, "resize")
    got = ours.prepare(random_image(300, 170), "")
    assert got.resized == (224, 336) and got.slots == len(got.pixels)
    assert ours.fingerprint != Qwen2VLImageProcessor.from_checkpoint(path, {}).fingerprint


def test_fingerprint_names_every_option_that_changes_pixels():
    base = Qwen2VLImageProcessor(3136, 12845056)
    others = [
        Qwen2VLImageProcessor(784, 12845056),
        Qwen2VLImageProcessor(3136, 1254400),
        Qwen2VLImageProcessor(3136, 12845056, patch=16),
        Qwen2VLImageProcessor(3136, 12845056, merge=1),
        Qwen2VLImageProcessor(3136, 12845056, temporal=1),
    ]
    assert len({p.fingerprint for p in [base, *others]}) == 6


def test_other_modes_are_converted_and_aspect_refused():
    ours = Qwen2VLImageProcessor(**LIMITS)
    grey = random_image(60, 60).convert("L")
    assert np.array_equal(ours.prepare(grey, "").pixels, ours.prepare(grey.convert("RGB"), "").pixels)
    with pytest.raises(BadRequest):
        ours.prepare(Image.new("RGB", (201, 1)), "")
