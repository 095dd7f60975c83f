"""Qwen3-VL's videos against its processor in transformers: frames, sizes, times in words, and whole chats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.hostile.altered_config import altered
from tests.oracles import qwen_vl_utils
from tests.oracles.transformers_model import Oracle
from tests.oracles.video_chats import chat, check_clip_answers
from tests.vision.vision_checkpoints import qwen3_vl
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_processor
from trencadis.core.errors import BadRequest, StartupError
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.placeholders import expand_with_timestamps, format_timestamps
from trencadis.multimodal.processor_interface import PreparedImage, PreparedVideo
from trencadis.multimodal.videos.frame_sampling import FrameLimits, sample_clip_frames
from trencadis.multimodal.videos.frame_size import clip_frame_size

LIMITS = FrameLimits(factor=32, cell=32, windows=False, clip=(4096, 25_165_824))
LEAST, MOST = 8192, 200_000
PIXELS: dict[str, Any] = {"min_pixels": 64 * 64, "max_pixels": 160_000}


def processor() -> Any:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    return Qwen3VLVideoProcessor(size={"shortest_edge": LEAST, "longest_edge": MOST})


def sampled(frames: int, rate: float) -> list[int]:
    """Indices by transformers."""
    found: list[int] = processor().sample_frames(SimpleNamespace(total_num_frames=frames, fps=rate)).tolist()
    return found


def words(indices: list[int], rate: float) -> list[str]:
    """What transformers says before each temporal patch."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    ask: Any = Qwen3VLProcessor._calculate_timestamps
    return [f"<{time:.1f} seconds>" for time in ask(None, list(indices), rate)]


def same_clips(count: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    rng = np.random.default_rng(0)
    for _ in range(count):
        frames, rate = int(rng.integers(2, 2000)), float(rng.choice([1.0, 10.0, 23.976, 25.0, 29.97, 60.0]))
        found = sample_clip_frames(frames, rate, LIMITS)
        want = sampled(frames, rate)
        assert list(found.indices) == want + want[-1:] * (len(want) % 2)
        height, width = (int(n) for n in np.exp(rng.uniform(np.log(20), np.log(2000), 2)))
        if max(height, width) <= 100 * min(height, width):
            least, most = 4096, int(rng.integers(100_000, 25_165_824))
            limits = FrameLimits(factor=32, cell=32, windows=False, clip=(least, most))
            size = smart_resize(len(want), height, width, 2, 32, least, most)
            assert clip_frame_size(height, width, found, limits) == size
        video = PreparedVideo("", (), found.indices, found.fps, 1.0, frames, found.rate)
        assert format_timestamps(video) == words(want, rate)


def test_frames_sizes_and_times_equal_the_processors() -> None:
    same_clips(300)


@pytest.mark.long
def test_twenty_thousand_clips() -> None:
    same_clips(20_000)


def test_options_of_a_request_hold() -> None:
    requested = MediaOptions(nframes=6, max_pixels=64 * 64)
    found = sample_clip_frames(50, 10.0, LIMITS, requested)
    assert len(found.indices) == 6 and (found.indices[0], found.indices[-1]) == (0, 49)
    assert clip_frame_size(300, 300, found, LIMITS, requested) == (64, 64)
    assert sample_clip_frames(3, 10.0, LIMITS).indices == (0, 1, 2, 2) and sample_clip_frames(
        1, 10.0, LIMITS
    ).indices == (0, 0)
    with pytest.raises(BadRequest, match="3 frames; 6 cannot be taken"):
        sample_clip_frames(3, 10.0, LIMITS, requested)
    with pytest.raises(BadRequest, match="min_pixels=9000 is above the limit of 4096 a frame"):
        clip_frame_size(300, 300, found, LIMITS, MediaOptions(min_pixels=9000, max_pixels=4096))


def test_patches_stand_apart_between_marks_of_their_own() -> None:
    """The marks around a video's own token go; where there are none, a video is put as it is."""
    empty = np.zeros((0, 1536), np.uint8)
    patch = PreparedImage("p", empty, (1, 2, 4), 2, 64, (32, 64))
    still = PreparedImage("s", empty, (1, 2, 2), 1, 64, (32, 32))
    video = PreparedVideo("v", (patch, patch), (0, 1, 2, 3), 2.0, 1.0, 4, 2.0)
    image, clip, first, last = 90, 91, 92, 93
    want = [5, 7, first, clip, clip, last, 8, first, clip, clip, last, 6, first, image, last]
    for around in ((first, clip, last), (clip,)):
        tokens = [5, *around, 6, first, image, last]
        places = [tokens.index(clip), tokens.index(image)]
        out, spans = expand_with_timestamps(
            tokens, image, [video, still], places, clip, None, [[7], [8]], (first, last)
        )
        assert out == want and [(s.offset, s.length) for s in spans] == [(3, 2), (8, 2), (13, 1)]
    with pytest.raises(ValueError, match="place 1 holds no media token"):
        expand_with_timestamps([5, image], image, [video], [1], clip, None, [[7], [8]], (first, last))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"), max_position_embeddings=4096)
    processor().save_pretrained(folder)
    assert (folder / "video_preprocessor_config.json").is_file()
    return folder


def inputs_of(oracle: Oracle, array: np.ndarray, rate: float) -> dict[str, Any]:
    """A chat about ``array``, uint8 [n, h, w, 3] at ``rate``, as transformers' processors make it."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    made, indices = processor(), sampled(len(array), rate)
    height, width = array.shape[1:3]
    size = smart_resize(len(indices), height, width, 2, 32, LEAST, MOST)
    shown = qwen_vl_utils.resize(torch.from_numpy(array[indices]).permute(0, 3, 1, 2), list(size))
    patches, t, h, w = made.patchify(((shown.float() / 255 - 0.5) / 0.5)[None], 16, 2, 2)
    text = oracle.tokenizer.apply_chat_template(chat("clip"), tokenize=False, add_generation_prompt=True)
    before, after = text.split("<|vision_start|><|video_pad|><|vision_end|>")
    one = "<|vision_start|>" + "<|video_pad|>" * (h * w // 4) + "<|vision_end|>"
    pieces = [before, *(piece for time in words(indices, rate) for piece in (time, one)), after]
    ids = [i for piece in pieces for i in oracle.tokenizer(piece)["input_ids"]]
    pad: Any = oracle.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values_videos": patches[0],
        "video_grid_thw": torch.tensor([[t, h, w]]), "mm_token_type_ids": (tokens == pad).int() * 2,
    }  # fmt: skip


def same_answers(path: Path, cases: list[tuple[int, float, int, int]], **flags: Any) -> None:
    check_clip_answers(path, cases, inputs_of, mm_processor_kwargs=PIXELS, **flags)


CASES = [(9, 4.0, 70, 100), (20, 10.0, 120, 90), (4, 1.0, 40, 300)]


def test_clips_answer_as_transformers(path: Path) -> None:
    same_answers(path, CASES)


@pytest.mark.long
@pytest.mark.parametrize("flags", [
    {"policy": "padded", "max_num_batched_tokens": 7}, {"encoder_cache_images": 2, "enable_prefix_caching": False},
    {"device": "hpu", "warmup": "skip", "block_size": 64}, {"device": "cuda", "policy": "twin", "warmup": "skip"},
])  # fmt: skip
def test_clips_on_devices_and_schedules(flags: dict[str, Any], path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    rng = np.random.default_rng(1)
    more = [(int(rng.integers(4, 40)), 10.0, *rng.integers(32, 200, 2).tolist()) for _ in range(12)]
    same_answers(path, [*CASES, *more], **flags)


@pytest.mark.parametrize(("key", "value", "named"), [
    ("cap_pixels_per_frame", True, "cap_pixels_per_frame"), ("fps", 1, "fps"), ("max_frames", 64, "max_frames"),
    ("patch_size", 14, "patch_size"), ("do_sample_frames", False, "do_sample_frames"), ("resample", 2, "resample"),
    ("video_processor_type", "Qwen2VLVideoProcessor", "video_processor_type"), ("image_mean", [0, 0, 0], "image_mean"),
    ("size", {"height": 1, "width": 2}, "size"),
])  # fmt: skip
def test_another_video_processor_is_refused(key: str, value: Any, named: str, path: Path, tmp_path: Path) -> None:
    folder = altered(path, tmp_path / "altered", "video_preprocessor_config.json", key, value)
    with pytest.raises(StartupError) as refused:
        image_processor(load_config(folder), {})
    assert named in str(refused.value) and "\n" not in str(refused.value)
