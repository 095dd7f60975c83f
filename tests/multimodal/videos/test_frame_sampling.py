"""Frame choice, sizes and pixels of clips against qwen-vl-utils and transformers."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.oracles import qwen_vl_utils
from tests.traffic import video_clips
from trencadis.core.errors import BadRequest, TooLarge, TrencadisError, UnsupportedMedia
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_OPTIONS, MediaOptions
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.videos.frame_sampling import FrameLimits, evenly_spaced, sample_frame_list, sample_frames
from trencadis.multimodal.videos.frame_size import frame_size
from trencadis.multimodal.videos.video_job import prepare_video, resize_frame

QWEN = FrameLimits()
TERMS: dict[str, Any] = {"max_pixels": 1 << 26, "max_frames": 768, "max_seconds": 3600.0, "room": 1 << 30}


def job(data: bytes, requested: MediaOptions = NO_OPTIONS, limits: dict[str, int] | None = None, **terms: Any) -> Any:
    """Values and uint8 [t, patches, 1176] of a clip."""
    values, buffers = prepare_video(
        bytearray(data), {**TERMS, "media": requested.given, "limits": limits or {}, **terms}
    )
    return values, np.stack([np.frombuffer(b, np.uint8).reshape(-1, 1176) for b in buffers])


def listing(files: list[bytes], requested: MediaOptions = NO_OPTIONS, **terms: Any) -> Any:
    """``job`` on a list of image files."""
    return job(b"".join(files), requested, parts=[(len(f), 0, 0) for f in files], **terms)


def values_of(pixels: np.ndarray) -> np.ndarray:
    """Normalised values of uint8 [t, patches, 1176]."""
    table = Qwen2VLImageProcessor(3136, 1 << 20).normalised_values
    bytes_ = pixels.reshape(-1, 3, 392)
    return np.stack([table[c][bytes_[:, c]] for c in range(3)], 1).reshape(-1, 1176)


def random_case(rng: np.random.Generator) -> tuple[int, float, dict[str, Any]]:
    """Frames, rate and options, most of them valid."""
    total = int(np.exp(rng.uniform(np.log(2), np.log(3000))))
    fps = float(rng.choice([1.0, 5.0, 12.5, 23.976, 25.0, 29.97, 30.0, 60.0]))
    requested: dict[str, Any] = {}
    if rng.random() < 0.3:
        requested["nframes"] = int(rng.integers(2, min(total, 60) + 1))
    else:
        if rng.random() < 0.6:
            requested["fps"] = float(rng.choice([0.25, 0.5, 1.0, 2.0, 3.0, 10.0]))
        if rng.random() < 0.4:
            requested["min_frames"] = int(rng.integers(1, 20))
        if rng.random() < 0.4:
            requested["max_frames"] = int(rng.integers(2, 100))
    if rng.random() < 0.3:
        requested["video_start"] = float(rng.uniform(0, total / fps / 2))
    if rng.random() < 0.3:
        requested["video_end"] = float(rng.uniform(total / fps / 2, 2 * total / fps))
    return total, fps, requested


def choice_of(module: Any, total: int, fps: float, requested: dict[str, Any]) -> tuple[list[int], float] | None:
    """qwen-vl-utils' frame numbers and rate; None where it refuses."""
    import torch

    try:
        first, last, left = module.calculate_video_frame_range(requested, total, fps)
        count = module.smart_nframes(requested, total_frames=left, video_fps=fps)
    except ValueError:
        return None
    return torch.linspace(first, last, count).round().long().tolist(), count / left * fps


def test_frames_are_chosen_as_qwen_vl_utils_does() -> None:
    module, rng = qwen_vl_utils.utils(), np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        total, fps, requested = random_case(rng)
        want = choice_of(module, total, fps, requested)
        if want is None:
            refused += 1
            with pytest.raises(BadRequest):
                sample_frames(total, fps, MediaOptions(**requested))
            continue
        got = sample_frames(total, fps, MediaOptions(**requested))
        assert list(got.indices) == want[0] and got.fps == pytest.approx(want[1], rel=1e-12)
    assert 0 < refused < 500


def test_recorded_choices() -> None:
    """What qwen-vl-utils 0.0.14 answered, for machines that do not have it."""
    assert sample_frames(31, 25.0).indices == (0, 10, 20, 30)
    assert (
        sample_frames(300, 30.0).indices[:6] == (0, 16, 31, 47, 63, 79) and len(sample_frames(300, 30.0).indices) == 20
    )
    assert sample_frames(7, 2.0, MediaOptions(nframes=5)).indices == (0, 2, 4, 6)
    assert sample_frames(3, 30.0).indices == (0, 2)
    assert sample_frames(100, 25.0, MediaOptions(video_start=1.0, video_end=2.0)).indices == (25, 33, 42, 50)


def test_spread_is_torch_linspace() -> None:
    import torch

    rng = np.random.default_rng(1)
    for _ in range(1500):
        first, count = int(rng.integers(0, 3000)), int(rng.integers(1, 769))
        last = first + count + int(rng.integers(0, 9000))
        assert list(evenly_spaced(first, last, count)) == torch.linspace(first, last, count).round().long().tolist()


def test_sizes_are_qwen_vl_utils() -> None:
    """Every size and set of limits: what the resize is asked for, or that both refuse."""
    rng = np.random.default_rng(2)
    for _ in range(1000):
        height, width, count = int(rng.integers(8, 1500)), int(rng.integers(8, 1500)), 2 * int(rng.integers(1, 300))
        requested: dict[str, Any] = {}
        if rng.random() < 0.3:
            requested["min_pixels"] = int(rng.integers(4, 200)) * 784
        if rng.random() < 0.4:
            requested["max_pixels"] = int(rng.integers(200, 900)) * 784
        if rng.random() < 0.4:
            requested["total_pixels"] = int(rng.integers(1000, 40_000)) * 784
        if rng.random() < 0.1:
            requested |= {"resized_height": int(rng.integers(20, 900)), "resized_width": int(rng.integers(20, 900))}
        try:
            want = qwen_vl_utils.size_of(count, height, width, **requested)
        except (AssertionError, ValueError):
            with pytest.raises(TrencadisError):
                frame_size(height, width, count, QWEN, MediaOptions(**requested))
            continue
        assert list(frame_size(height, width, count, QWEN, MediaOptions(**requested))) == want


def test_a_checkpoint_for_small_images_sizes_its_frames_like_them() -> None:
    small = FrameLimits(3136, 50176)
    assert frame_size(480, 640, 8, small) == (168, 252)
    assert frame_size(30, 30, 8, small) == (56, 56)
    with pytest.raises(BadRequest, match="above this server's limit"):
        frame_size(480, 640, 8, small, MediaOptions(min_pixels=60_000))
    with pytest.raises(TooLarge):
        frame_size(
            480,
            640,
            8,
            FrameLimits(3136, 50176, slots=512, tokens=64),
            MediaOptions(resized_height=560, resized_width=560),
        )


CLIPS: list[tuple[int, int, int, float, dict[str, Any]]] = [
    (9, 120, 160, 10.0, {}),
    (31, 96, 128, 25.0, {"fps": 4.0, "min_pixels": 784 * 16, "max_pixels": 784 * 40}),
    (12, 200, 100, 8.0, {"nframes": 7, "total_pixels": 784 * 600}),
    (40, 64, 64, 20.0, {"resized_height": 100, "resized_width": 220, "video_start": 0.5}),
]


def near(ours: np.ndarray, reference: np.ndarray) -> float:
    """Asserts equal bytes but for ties, which float32 sums in another order round either way; the share of those."""
    off = np.abs(ours.astype(int) - reference.astype(int))
    assert off.max(initial=0) <= 1 and (off > 0).mean() < 5e-3
    return float((off > 0).mean())


def check_file(count: int, height: int, width: int, fps: float, requested: dict[str, Any], seed: int) -> None:
    """A WebP of the clip: frames, rate, grid and pixel values."""
    array = video_clips.frames(np.random.default_rng(seed), count, height, width)
    want, rate = qwen_vl_utils.of_file(array, fps, **requested)
    values, pixels = job(video_clips.animation(array, "WEBP", round(1000 / fps)), MediaOptions(**requested))
    assert values["fps"] == pytest.approx(rate) and values["frames"] == count
    assert values["size"] == want.shape[2:] and len(values["indices"]) == len(want)
    for index, frame in zip(values["indices"], want, strict=True):
        near(resize_frame(array[index], values["size"]), frame.transpose(1, 2, 0))
    reference, grid = qwen_vl_utils.pixel_values(want)
    assert grid == [len(pixels), values["size"][0] // 14, values["size"][1] // 14]
    step = np.abs(values_of(pixels) - reference.numpy())
    assert (step < 1e-5).mean() > 0.995 and step.max() < 0.016


@pytest.mark.parametrize("case", range(len(CLIPS)))
def test_files(case: int) -> None:
    check_file(*CLIPS[case], seed=case)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_lists(count: int) -> None:
    array = video_clips.frames(np.random.default_rng(count), count, 90, 130)
    requested: dict[str, Any] = {"max_pixels": 784 * 200} if count == 5 else {}
    want, _ = qwen_vl_utils.of_list(video_clips.make_frames(array), **requested)
    values, pixels = listing([video_clips.png(p) for p in video_clips.make_frames(array)], MediaOptions(**requested))
    assert values["size"] == want.shape[2:] and len(values["indices"]) == len(want)
    reference, _ = qwen_vl_utils.pixel_values(want)
    step = np.abs(values_of(pixels) - reference.numpy())
    assert (step < 1e-5).mean() > 0.995 and step.max() < 0.016


def test_odd_lists_repeat_their_last_frame() -> None:
    assert sample_frame_list(3).indices == (0, 1, 2, 2) and sample_frame_list(1).indices == (0, 0)
    assert sample_frame_list(4).seconds == 1.0 and sample_frame_list(4, MediaOptions(fps=0.5)).seconds == 4.0


def test_gif_and_webp_delays() -> None:
    array = video_clips.frames(np.random.default_rng(0), 5, 40, 40)
    for format in ("GIF", "WEBP"):
        values, _ = job(video_clips.animation(array, format, [100, 200, 50, 0, 50]))
        assert values["frames"] == 5 and values["indices"] == (0, 1, 3, 4)
        assert values["fps"] == pytest.approx(4 / 5 * 5 / 0.5)


def test_a_still_gif_is_one_frame_twice() -> None:
    values, pixels = job(video_clips.animation(video_clips.frames(np.random.default_rng(0), 1, 40, 40)))
    assert values["indices"] == (0, 0) and len(pixels) == 1


FILMS = [
    ("mp4", "libx264", {"g": 10, "bf": 2}), ("matroska", "libx264", {"g": 7}), ("webm", "libvpx-vp9", {}),
    ("avi", "mpeg4", {"bf": 2}), ("mpegts", "libx264", {"g": 10}), ("mov", "mpeg4", {}), ("avi", "ffv1", {}),
]  # fmt: skip


@pytest.mark.parametrize(("format", "codec", "options"), FILMS)
def test_video_files(format: str, codec: str, options: dict[str, Any]) -> None:
    """The frames that qwen-vl-utils takes; which one it is shows in its brightness."""
    array = np.repeat(np.arange(31, dtype=np.uint8) * 8, 48 * 64 * 3).reshape(31, 48, 64, 3)
    data = video_clips.film(array, format, codec, **options)
    for requested in ({}, {"nframes": 10}, {"fps": 5.0, "video_start": 0.3}):
        chosen = sample_frames(31, 25.0, MediaOptions(**requested))
        values, pixels = job(data, MediaOptions(**requested))
        assert (values["indices"], values["fps"]) == (chosen.indices, pytest.approx(chosen.fps))
        shown = pixels.reshape(len(pixels), -1, 3, 2, 196).mean(axis=(1, 2, 4)).reshape(-1) / 8
        assert np.abs(shown - np.array(chosen.indices)).max() < 0.8


def test_bad_files_are_refused() -> None:
    array = video_clips.frames(np.random.default_rng(0), 8, 40, 40)
    gif, webp = video_clips.animation(array), video_clips.animation(array, "WEBP")
    for data, error in [
        (b"", UnsupportedMedia), (b"hello, world" * 50, UnsupportedMedia), (gif[:200], BadRequest),
        (webp[: len(webp) // 2], BadRequest), (b"#EXTM3U\nfile:///etc/passwd", UnsupportedMedia),
    ]:  # fmt: skip
        with pytest.raises(error):
            job(data)
    with pytest.raises(BadRequest, match="another size"):
        listing(
            [video_clips.png(p.resize((40 + 60 * i, 40))) for i, p in enumerate(video_clips.make_frames(array[:2]))]
        )


def test_damaged_video_files_are_refused() -> None:
    data = video_clips.film(video_clips.frames(np.random.default_rng(0), 8, 48, 64))
    for bad in (data[:100], data[:40] + bytes(500), b"\x00\x00\x00\x18ftypmp42" + bytes(300)):
        with pytest.raises(BadRequest):
            job(bad)


def test_limits() -> None:
    gif = video_clips.animation(video_clips.frames(np.random.default_rng(0), 30, 40, 40))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"max_frames": 4}, TooLarge, "6 frames"), ({"max_seconds": 2.0}, TooLarge, "lasts 3 seconds"),
        ({"max_pixels": 1000}, TooLarge, "1600|40x40"),
    ]  # fmt: skip
    for terms, error, text in cases:
        with pytest.raises(error, match=text):
            job(gif, **terms)
    # No error of the clip's: another request for it may have more room.
    values, buffers = prepare_video(bytearray(gif), {**TERMS, "media": {}, "limits": {}, "room": 100})
    assert "lower fps" in values["no_room"] and not buffers


def test_missing_pyav_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(UnsupportedMedia, match=r"pip install 'trencadis\[video\]'"):
        job(b"\x00\x00\x00\x18ftypmp42" + bytes(300))


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_the_video_processor_of_transformers_lays_patches_out_alike() -> None:
    import torch
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    video = np.random.default_rng(0).integers(0, 256, (5, 3, 56, 84)).astype(np.float32)
    made = Qwen2VLVideoProcessor()(
        videos=[torch.from_numpy(video)], do_sample_frames=False, do_resize=False, return_tensors="pt"
    )
    values, grid = qwen_vl_utils.pixel_values(video)
    assert made["video_grid_thw"][0].tolist() == grid
    assert (made["pixel_values_videos"] - values).abs().max() < 1e-5
