"""The tower's output equals transformers' in float32: any grid, any packing, whatever lies in the padding.

The bar is 1e-5 of the oracle's largest value; every test prints the worst figure that it met (``-s`` shows it).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracles.reference_towers import DEVICES, encoded, make_image, random_grid, shown, tower_harness
from tests.vision.family_harness import FamilyHarness, Shown
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

BAR = 1e-5
SIDES = range(2, 33, 2)

Harnesses = Callable[[str], FamilyHarness]


@pytest.fixture(scope="module")
def harnesses(vl_checkpoint: Path) -> Harnesses:
    """A harness per device, made once."""
    return cache(lambda device: tower_harness(vl_checkpoint, device))


@pytest.fixture(scope="module")
def images(vl_checkpoint: Path, oracle: Any) -> Callable[[tuple[int, int], int], Shown]:
    """``images((h, w), seed)``: random patches with their oracle, kept for the other devices."""
    model = oracle(vl_checkpoint)
    # The device is the parameter that changes fastest, so three neighbours share what is made.
    return lru_cache(500)(lambda grid, seed: make_image(model, grid, np.random.default_rng((*grid, seed))))


def check(name: str, worst: float, count: int) -> None:
    print(f"{name}: {count} launches, worst {worst:.1e} of the largest value")
    assert worst <= BAR


def alone(harness: FamilyHarness, images: Any, grids: list[tuple[int, int]], seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    check(name, max(harness.worst([images(g, seed)], rng) for g in grids), len(grids))


def packed(harness: FamilyHarness, images: Any, count: int, seed: int, name: str, most: int = 64) -> None:
    """Packings of 1 to 8 images, half of them with spare windows."""
    rng, worst = np.random.default_rng(seed), 0.0
    for _ in range(count):
        grids = [random_grid(rng, most) for _ in range(int(rng.integers(1, 9)))]
        spare = 64 * int(rng.integers(0, 8)) * int(rng.integers(0, 2))
        worst = max(worst, harness.worst([images(g, i) for i, g in enumerate(grids)], rng, spare))
    check(name, worst, count)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sample_of_grids_alone(device: str, harnesses: Harnesses, images: Any) -> None:
    """Every side from 2 to 32 once, against a long and a short other side."""
    grids = [(s, t) for s, t in zip(SIDES, reversed(SIDES), strict=True)] + [(2, 2), (32, 32), (2, 32), (30, 8)]
    alone(harnesses(device), images, grids, 0, f"{device}, sample of grids")


@pytest.mark.parametrize("device", DEVICES)
def test_a_sample_of_packings(device: str, harnesses: Harnesses, images: Any) -> None:
    packed(harnesses(device), images, 6, 1, f"{device}, sample of packings", most=24)


def test_poison_would_be_seen(harnesses: Harnesses, images: Any) -> None:
    """Without the masks the same check fails: one patch too many counted as real."""
    harness = harnesses("padded")
    pack = harness.model.pack

    def sloppy(images: Any, slots: int) -> Any:
        inputs = pack(images, slots)
        inputs.count = np.minimum(inputs.count + 1, 64).astype(np.int32)
        return inputs

    harness.model.pack = sloppy
    try:
        assert not harness.worst([images((10, 10), 0)], np.random.default_rng(0)) < 100 * BAR
    finally:
        del harness.model.pack


@pytest.mark.parametrize("device", DEVICES)
def test_resize_alignment(device: str, harnesses: Harnesses, vl_checkpoint: Path, oracle: Any) -> None:
    """Sides are multiples of 112, no slot is padding, and the oracle is transformers' tower on those sizes."""
    whole_windows(harnesses(device), vl_checkpoint, oracle, ((100, 130), (260, 90), (350, 350)), f"{device}, resize")


def whole_windows(harness: FamilyHarness, path: Path, oracle: Any, sizes: Any, name: str) -> None:
    processor = Qwen2VLImageProcessor.from_checkpoint(path, {}, "resize")
    rng, worst = np.random.default_rng(5), 0.0
    for height, width in sizes:
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        made = processor.prepare(Image.fromarray(noise), "x")
        grid = made.grid[1:]
        assert all(side % 8 == 0 for side in grid) and made.slots == count_slots(made.grid) == grid[0] * grid[1]
        one = shown(grid, made.pixels, encoded(oracle(path), made.pixels, grid))
        worst = max(worst, harness.worst([one], rng))
    check(name, worst, len(sizes))


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [SIDES[i : i + 4] for i in range(0, 16, 4)], ids=lambda r: f"{r[0]}-{r[-1]}")
def test_every_grid_alone(device: str, rows: Any, harnesses: Harnesses, images: Any) -> None:
    """All 256 even grids up to 32 x 32, in four parts."""
    grids = [(h, w) for h in rows for w in SIDES]
    alone(harnesses(device), images, grids, 2, f"{device}, grids of {rows[0]} to {rows[-1]} rows")


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", range(5))
def test_five_hundred_grids_alone(device: str, part: int, harnesses: Harnesses, images: Any) -> None:
    rng = np.random.default_rng(100 + part)
    alone(harnesses(device), images, [random_grid(rng) for _ in range(100)], 3, f"{device}, random grids {part}")


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", range(6))
def test_three_hundred_packings(device: str, part: int, harnesses: Harnesses, images: Any) -> None:
    packed(harnesses(device), images, 50, 200 + part, f"{device}, packings {part}")


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_resize_alignment_of_many_sizes(device: str, harnesses: Harnesses, vl_checkpoint: Path, oracle: Any) -> None:
    rng = np.random.default_rng(9)
    sizes = [(int(h), int(w)) for h, w in rng.integers(28, 900, (40, 2))]
    whole_windows(harnesses(device), vl_checkpoint, oracle, sizes, f"{device}, resize")


def test_bytes_reach_the_tower_as_the_processor_would_send_them(
    harnesses: Harnesses, vl_checkpoint: Path, oracle: Any
) -> None:
    """Every byte value through the device's normalisation; an off-by-one in it would pass unseen on noise alone."""
    ramp = np.arange(16 * 1176, dtype=np.uint32).astype(np.uint8).reshape(16, 1176)
    one = shown((4, 4), ramp, encoded(oracle(vl_checkpoint), ramp, (4, 4)))
    assert torch.unique(torch.from_numpy(ramp)).numel() == 256
    check("bytes", harnesses("cpu").worst([one], np.random.default_rng(0)), 1)
