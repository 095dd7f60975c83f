"""Each altered key of preprocessor_config.json is right, as transformers' PIL processor is, or refused; never wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.hostile.altered_config import GONE, altered, verdict
from trencadis.assets import demo_path
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.multimodal.qwen2_5_vl.model import Qwen25VL
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import pixel_limits

RIGHT, REFUSED = "right", "refused"
FILE = "preprocessor_config.json"
CASES: list[tuple[str, Any, str]] = [
    ("do_resize", False, REFUSED), ("do_resize", True, RIGHT), ("do_resize", None, REFUSED), ("do_resize", 0, REFUSED),
    ("resample", 3, RIGHT), ("resample", 2, REFUSED), ("resample", 0, REFUSED), ("resample", "bicubic", REFUSED),
    ("do_rescale", False, RIGHT), ("do_rescale", True, RIGHT), ("do_rescale", "no", REFUSED),
    ("rescale_factor", 1 / 127.5, RIGHT), ("rescale_factor", 0.5, RIGHT), ("rescale_factor", math.nan, REFUSED),
    ("rescale_factor", 0, REFUSED), ("rescale_factor", -1.0, REFUSED), ("rescale_factor", "1/255", REFUSED),
    ("do_normalize", False, RIGHT), ("do_normalize", None, REFUSED), ("do_normalize", 1, REFUSED),
    ("image_mean", [0.5, 0.4, 0.3], RIGHT), ("image_mean", 0.5, RIGHT), ("image_mean", GONE, RIGHT),
    ("image_mean", [0.5, 0.5], REFUSED), ("image_mean", ["a", "b", "c"], REFUSED), ("image_mean", [0, 0, 0], RIGHT),
    ("image_std", [0.5, 0.4, 0.3], RIGHT), ("image_std", 0.25, RIGHT), ("image_std", [0.5, 0, 0.5], REFUSED),
    ("image_std", [0.5, math.nan, 0.5], REFUSED), ("image_std", {}, REFUSED), ("do_convert_rgb", False, RIGHT),
    ("min_pixels", 2_000_000, REFUSED), ("min_pixels", 12_544, RIGHT), ("min_pixels", 0, REFUSED),
    ("min_pixels", -1, REFUSED), ("min_pixels", "3136", REFUSED), ("min_pixels", 3136.5, REFUSED),
    ("min_pixels", math.nan, REFUSED), ("max_pixels", 20_000, RIGHT), ("max_pixels", 100, REFUSED),
    ("max_pixels", -5, REFUSED), ("max_pixels", [1], REFUSED), ("max_pixels", True, REFUSED),
    ("max_pixels", 10**12, REFUSED), ("size", {"shortest_edge": 9, "longest_edge": 5_000}, RIGHT),
    ("size", [], REFUSED),
    ("size", {"height": 56, "width": 56}, REFUSED), ("patch_size", 16, REFUSED), ("patch_size", 14.0, REFUSED),
    ("temporal_patch_size", 1, REFUSED), ("merge_size", 1, REFUSED), ("merge_size", "2", REFUSED),
    ("do_center_crop", False, RIGHT), ("image_mean", None, REFUSED), ("do_pad", True, RIGHT),
    ("an_unknown_key", [1], RIGHT),
    ("image_processor_type", "Qwen2VLImageProcessorFast", RIGHT),
    ("image_processor_type", "CLIPImageProcessor", REFUSED),
]  # fmt: skip
CHECKPOINTS = ("demo", "qwen2_5_vl")
SIZES = ((150, 210), (31, 700), (400, 380))


@pytest.fixture(scope="session")
def source(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda name: Path(demo_path()) if name == "demo" else checkpoint(name)


def images() -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES]


def tower(path: Path) -> Any:
    """The values that the device computes, with the constants of the loaded model."""
    backend = make_backend(BackendConfig(options={"threads": "1"}))
    return Qwen25VL(load_config(path), backend).tower


def ours(path: Path) -> torch.Tensor:
    made, device = Qwen2VLImageProcessor.from_checkpoint(path, {}), tower(path)
    assert pixel_limits(path, {}) == (made.min_pixels, made.max_pixels)
    pixels = [torch.from_numpy(made.prepare(image, "").pixels) for image in images()]
    return torch.cat([device.ops.patches(p, *device.patch_embed.scale_shift, torch.float32) for p in pixels])


def run_transformers(path: Path) -> torch.Tensor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made: torch.Tensor = Qwen2VLImageProcessorPil.from_pretrained(path)(images(), return_tensors="pt")["pixel_values"]
    return made


def wrong(source: Path, tmp_path: Path, picked: list[tuple[str, Any, str]]) -> list[str]:
    lines = []
    for i, (key, value, expected) in enumerate(picked):
        path = altered(source, tmp_path / str(i), FILE, key, value)
        found = verdict(lambda path=path: ours(path), lambda path=path: run_transformers(path), key)
        if found != expected:
            lines.append(f"{key} = {'(none)' if value is GONE else value!r}: {found}, expected: {expected}")
    return lines


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_sample_of_altered_keys(source: Any, tmp_path: Path, name: str) -> None:
    assert not wrong(source(name), tmp_path, random.Random(name).sample(CASES, 5))


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_altered_key(source: Any, tmp_path: Path, name: str) -> None:
    problems = wrong(source(name), tmp_path, CASES)
    assert not problems, "\n".join(problems)


def test_the_limits_of_size_and_the_defaults(source: Any, tmp_path: Path) -> None:
    """The checkpoints here name min_pixels, which hides ``size``."""
    for i, (size, want) in enumerate((
        (GONE, (3136, 1_003_520)), ({"shortest_edge": 784, "longest_edge": 20_000}, (784, 20_000)),
        ({"shortest_edge": 784}, "size.longest_edge"), ({"height": 56, "width": 56}, "size is"),
    )):  # fmt: skip
        path = altered(source("demo"), tmp_path / f"a{i}", FILE, "min_pixels", GONE)
        path = altered(path, tmp_path / f"b{i}", FILE, "max_pixels", GONE)
        path = altered(path, tmp_path / f"c{i}", FILE, "size", size)
        if isinstance(want, str):
            with pytest.raises(Exception, match=want):
                Qwen2VLImageProcessor.from_checkpoint(path, {})
        else:
            assert pixel_limits(path, {}) == want


def test_a_nested_processor_comes_first(source: Any, tmp_path: Path) -> None:
    nested = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.01}
    path = altered(source("demo"), tmp_path / "nested", "processor_config.json", "image_processor", nested)
    assert Qwen2VLImageProcessor.from_checkpoint(path, {}).mean == (0.1, 0.2, 0.3)
    assert verdict(lambda: ours(path), lambda: run_transformers(path), "image_processor") == "right"


def test_videos_of_other_colours_are_refused(source: Any, tmp_path: Path) -> None:
    key, file = "image_mean", "video_preprocessor_config.json"
    same = altered(source("demo"), tmp_path / "same", file, key, [0.48145466, 0.4578275, 0.40821073])
    Qwen2VLImageProcessor.from_checkpoint(same, {})
    other = altered(source("demo"), tmp_path / "other", file, key, [0.5, 0.5, 0.5])
    with pytest.raises(Exception, match=r"video_preprocessor_config\.json: image_mean is"):
        Qwen2VLImageProcessor.from_checkpoint(other, {})
