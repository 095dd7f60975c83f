"""The two variables that name images: patches as Gaudi's guide counts them, and sizes in pixels with counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traffic.launch_lines import model_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.model_config import ImageNeeds
from trencadis.core.engine.startup_plan import shape_limits
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_options import PlannedImageSize, parse_image_sizes, read_bucket_options
from trencadis.core.shapes.bucket_planner import image_batch_slots, make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.multimodal.patch_packing import count_slots, patch_grid
from trencadis.multimodal.qwen2_vl.smart_resize import image_needs, smart_resize

GUIDE = (1600, 3136, 4096, 6400, 7744, 9216, 12544)
MODEL = model_of(3584, 28, 28, 4, 18944)
SIDES = (560, 784, 896, 1120, 1232, 1344, 1568)


def test_buckets_are_patches_of_a_whole_image() -> None:
    """The guide's list: squares of 560 to 1568 pixels. Each bucket is the slots of its image, in any alignment."""
    found = read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": ", ".join(map(str, GUIDE))}).vision
    assert found == GUIDE and tuple(side * side // 14**2 for side in SIDES) == GUIDE
    limits = ShapeLimits(128, 32768, 32768, 128, image_slots=12544)
    plan = make_plan(SERVING, limits, read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": ",".join(map(str, GUIDE))}))
    assert tuple(b.dims[0] for b in plan.of(Stage.VISION)) == GUIDE
    for side, bucket in zip(SIDES, GUIDE, strict=True):
        for factor in (28, 112):
            slots = count_slots(patch_grid(*smart_resize(side, side, factor)))
            assert plan.fit(Stage.VISION, (slots,)).dims == (bucket,)
    assert read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": str(401408 // 14**2)}).vision == (2048,), (
        "the guide's other example"
    )


def test_an_image_of_other_sides_fills_whole_windows() -> None:
    """1280x720 has 4,784 patches and needs 84 windows: the bucket above its slots takes it."""
    limits = ShapeLimits(128, 32768, 32768, 128, image_slots=12544)
    plan = make_plan(SERVING, limits, read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": ",".join(map(str, GUIDE))}))
    grid = patch_grid(*smart_resize(720, 1280))
    assert (grid[1] * grid[2], count_slots(grid)) == (4784, 5376)
    assert plan.fit(Stage.VISION, (count_slots(grid),)).dims == (6400,)


def test_what_cannot_be_patches_is_refused_with_the_next_that_can() -> None:
    with pytest.raises(StartupError, match=r"'1590' must be .* divisible by 64 \(the next one is 1600\): patches"):
        read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": "1590"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("864x480", (PlannedImageSize(864, 480),)),
        (" 1024X768 , 768x1024x4,", (PlannedImageSize(1024, 768), PlannedImageSize(768, 1024, 4, 4))),
        ("864x480x1-20", (PlannedImageSize(864, 480, 1, 20),)),
    ],
)
def test_sizes_with_counts(text: str, found: tuple[PlannedImageSize, ...]) -> None:
    assert parse_image_sizes(text) == read_bucket_options({"VLLM_MULTIMODAL_RESOLUTIONS": text}).images == found


@pytest.mark.parametrize(
    "text", ["864", "864x", "x480", "0x480", "864x480x0", "864x480x3-2", "864x480x0-2", "864x480x1x2", "8.5x4", "-8x4"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"VLLM_MULTIMODAL_RESOLUTIONS=.*is no size; give WxH, WxHxN or WxHxN-M"):
        read_bucket_options({"VLLM_MULTIMODAL_RESOLUTIONS": f"1024x768,{text}"})


def test_images_at_a_time_become_slots_of_launches() -> None:
    """1792 slots each, 12544 a launch: seven share one, the eighth begins another."""
    assert image_batch_slots(1792, 1, 3, 12544) == {1792, 3584, 5376}
    assert image_batch_slots(1792, 20, 20, 12544) == {12544, 6 * 1792}
    assert image_batch_slots(1792, 1, 20, 12544) == {1792 * n for n in range(1, 8)}
    assert image_batch_slots(16384, 1, 4, 12544) == {16384}, "a large one has a launch of its own"


def test_named_images_get_buckets_beside_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_MULTIMODAL_RESOLUTIONS", "864x480,640x480x2-3")
    needs = image_needs(tmp_path, {})
    # 868 x 476: 62 x 34 patches, 8 x 5 windows; 644 x 476: 46 x 34 patches, 6 x 5 windows.
    assert needs.images == ((2560, 0, 0), (1920, 2, 3))
    for limit, sizes in ((1, {2560, 3840, 5760}), (4, {10240, 3840, 5760})):
        config = EngineConfig(limit_mm_per_prompt={"image": limit}, max_model_len=2048)
        limits = shape_limits(config, MODEL, SERVING, needs)
        for environ, listed in (({}, set()), ({"VLLM_MULTIMODAL_BUCKETS": "1600"}, {1600})):
            requested = read_bucket_options(environ)
            found = {b.dims[0] for b in make_plan(SERVING, limits, requested).of(Stage.VISION)}
            assert sizes <= found and (not listed or found == sizes | listed)
    assert make_plan(SERVING, limits, read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": "None"})).of(Stage.VISION) == ()
    with pytest.raises(StartupError, match="RESOLUTIONS: 9000x10: The image's aspect ratio"):
        monkeypatch.setenv("VLLM_MULTIMODAL_RESOLUTIONS", "9000x10")
        image_needs(tmp_path, {})
    assert ImageNeeds().images == ()
