"""Videos of GLM-4.1V and GLM-4.6V-Flash against transformers: frames, sizes, times as text, and whole chats."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.hostile.altered_config import altered
from tests.oracles import qwen_vl_utils
from tests.oracles.transformers_model import Oracle
from tests.oracles.video_chats import chat, check_clip_answers
from tests.vision.vision_checkpoints import IMAGE, glm4v
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of, image_processor, import_object
from trencadis.core.errors import StartupError
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.processor_interface import PreparedVideo
from trencadis.multimodal.videos.frame_sampling import FrameLimits, sample_clip_frames
from trencadis.multimodal.videos.frame_size import clip_frame_size

NAMES = {"Glm4v": "seconds", "Glm46V": "dense"}
LEAST, MOST = 112 * 112, 200_000
RATES = (1.0, 10.0, 23.976, 25.0, 29.97, 60.0)


def processor(name: str) -> Any:
    """transformers' video processor; where it needs torchvision, that is not what is used of it here."""
    sys.modules.setdefault("torchvision.transforms.v2", ModuleType("torchvision.transforms.v2"))
    vars(sys.modules["torchvision.transforms.v2"]).setdefault("functional", None)
    module: Any = __import__(f"transformers.models.{name.lower()}.video_processing_{name.lower()}", fromlist=["x"])
    return module


def sampled(name: str, frames: int, rate: float) -> list[int]:
    """Indices by transformers."""
    kind: Any = getattr(processor(name), f"{name}VideoProcessor")
    itself = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
    held = SimpleNamespace(total_num_frames=frames, fps=rate, duration=frames / rate)
    found: list[int] = kind.sample_frames(itself, held).tolist()
    return found


def words(name: str, indices: list[int], rate: float) -> list[str]:
    """What transformers says behind each temporal patch."""
    times = [index / rate for index in indices[::2]]
    return [str(int(time)) if name == "Glm4v" else f"{time:.1f} seconds" for time in times]


def limits_of(name: str, clip: tuple[int, int]) -> FrameLimits:
    return FrameLimits(windows=False, clip=clip, rule=NAMES[name])


def same_clips(name: str, count: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count):
        frames, rate = int(np.exp(rng.uniform(np.log(2), np.log(20_000)))), float(rng.choice(RATES))
        found, want = sample_clip_frames(frames, rate, limits_of(name, (LEAST, MOST))), sampled(name, frames, rate)
        if not want:  # transformers takes no frame of so short a video
            assert found.indices == (0, 0)
            continue
        assert list(found.indices) == want, (frames, rate)
        height, width = (int(n) for n in np.exp(rng.uniform(np.log(20), np.log(2000), 2)))
        if max(height, width) <= 100 * min(height, width):
            most = int(rng.integers(100_000, 25_165_824))
            size = processor(name).smart_resize(len(want), height, width, 2, 28, LEAST, most)
            assert clip_frame_size(height, width, found, limits_of(name, (LEAST, most))) == size


@pytest.mark.parametrize("name", NAMES)
def test_frames_and_sizes_equal_the_processors(name: str) -> None:
    same_clips(name, 60)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_five_thousand_clips(name: str) -> None:
    same_clips(name, 5000)


def test_a_request_that_asks_for_frames_gets_them_evenly_spaced() -> None:
    found = sample_clip_frames(50, 10.0, limits_of("Glm46V", (LEAST, MOST)), MediaOptions(nframes=6))
    assert len(found.indices) == 6 and (found.indices[0], found.indices[-1]) == (0, 49)
    assert sample_clip_frames(1, 10.0, limits_of("Glm4v", (LEAST, MOST))).indices == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_times_are_written_as_the_processor_writes_them(name: str) -> None:
    video = PreparedVideo("", (), (0, 3, 25, 31), 2.0, 1.0, 40, 10.0)
    side = family_of(f"{name}ForConditionalGeneration").vision
    assert side is not None and import_object(side.times)(video) == words(name, [0, 3, 25, 31], 10.0)


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = str(request.param)
    folder = glm4v(tmp_path_factory.mktemp(name), name=name, max_position_embeddings=4096)
    settings = '{"video_processor_type": "%sVideoProcessor", "size": {"shortest_edge": %d, "longest_edge": %d}}'
    (folder / "video_preprocessor_config.json").write_text(settings % (name, LEAST, MOST))
    return name, folder


def inputs_of(name: str, oracle: Oracle, array: np.ndarray, rate: float) -> dict[str, Any]:
    """A chat about ``array``, uint8 [n, h, w, 3] at ``rate``, as transformers' processors make it."""
    indices = sampled(name, len(array), rate)
    size = processor(name).smart_resize(len(indices), *array.shape[1:3], 2, 28, LEAST, MOST)
    shown = qwen_vl_utils.resize(torch.from_numpy(array[indices]).permute(0, 3, 1, 2), list(size))
    values, (t, h, w) = qwen_vl_utils.pixel_values(shown.float().numpy())
    text = oracle.tokenizer.apply_chat_template(chat("clip"), tokenize=False, add_generation_prompt=True)
    before, after = text.split("<|video|>")
    one = "<|begin_of_image|>" + "<|image|>" * (h * w // 4) + "<|end_of_image|>"
    whole = before + "".join(one + time for time in words(name, indices, rate)) + after
    tokens = torch.tensor([oracle.tokenizer(whole)["input_ids"]])
    return {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values_videos": values,
        "video_grid_thw": torch.tensor([[t, h, w]]), "mm_token_type_ids": (tokens == IMAGE).int() * 2,
    }  # fmt: skip


def same_answers(name: str, path: Path, cases: list[tuple[int, float, int, int]], **flags: Any) -> None:
    check_clip_answers(path, cases, partial(inputs_of, name), **flags)


CASES = [(9, 4.0, 70, 100), (20, 10.0, 120, 90)]


def test_clips_answer_as_transformers(named: tuple[str, Path]) -> None:
    same_answers(*named, CASES)


@pytest.mark.long
@pytest.mark.parametrize("flags", [
    {"policy": "padded", "max_num_batched_tokens": 7}, {"encoder_cache_images": 2, "enable_prefix_caching": False},
    {"device": "hpu", "warmup": "skip", "block_size": 64}, {"device": "cuda", "policy": "twin", "warmup": "skip"},
])  # fmt: skip
def test_clips_on_devices_and_schedules(flags: dict[str, Any], named: tuple[str, Path], monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    rng = np.random.default_rng(1)
    more = [(int(rng.integers(4, 40)), 10.0, *rng.integers(32, 200, 2).tolist()) for _ in range(6)]
    same_answers(*named, [*CASES, *more], **flags)


@pytest.mark.parametrize(("key", "value", "words"), [
    ("fps", 1, "fps"), ("max_duration", 20, "max_duration"), ("do_sample_frames", False, "do_sample_frames"),
    ("video_processor_type", "Qwen2VLVideoProcessor", "video_processor_type"), ("size", {"height": 1}, "size"),
])  # fmt: skip
def test_another_video_processor_is_refused(
    key: str, value: Any, words: str, named: tuple[str, Path], tmp_path: Path
) -> None:
    folder = altered(named[1], tmp_path / "altered", "video_preprocessor_config.json", key, value)
    with pytest.raises(StartupError) as refused:
        image_processor(load_config(folder), {})
    assert words in str(refused.value) and "\n" not in str(refused.value)
