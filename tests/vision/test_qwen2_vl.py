"""Qwen2-VL against transformers: sizes, ids, pixels, the tower on every device, whole chats, mistakes, altered keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.hostile.altered_config import GONE, Case, altered, verdict
from tests.oracles import qwen_vl_utils
from tests.oracles.reference_towers import normalised
from tests.oracles.transformers_model import Oracle, assert_same, conversation, make_image
from tests.oracles.video_chats import chat, video_inputs
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness, Shown, worst_of_many, worst_packing
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import StartupError
from trencadis.multimodal import patch_packing
from trencadis.multimodal.patch_packing import count_slots

BAR = 1e-5
LARGEST = 8 * 4096
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256,
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 160_000},
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa 7": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112, "seed": 2},
    "gelu, tied": {"act": "gelu", "tie_word_embeddings": True, "seed": 3},
}


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2_vl")


def shown(model: Any, h: int, w: int, rng: np.random.Generator) -> Shown:
    """An image of h x w patches and its rows in transformers."""
    pixels = rng.integers(0, 256, (h * w, 1176), dtype=np.uint8)
    with torch.no_grad():
        want = model.model.visual(normalised(pixels), grid_thw=torch.tensor([[1, h, w]])).pooler_output
    return Shown((1, h, w), count_slots((1, h, w), windows=False), pixels, want)


@pytest.fixture(scope="module")
def harnesses(path: Path) -> Callable[[str], FamilyHarness]:
    return cache(lambda device: FamilyHarness(path, device, LARGEST))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_tower_equal_transformers(device: str, harnesses: Any, oracle: Any, path: Path) -> None:
    worst = worst_packing(harnesses(device), partial(shown, oracle(path)), 3, 1, 16)
    print(f"{device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_two_hundred_images_and_a_hundred_packings(device: str, harnesses: Any, oracle: Any, path: Path) -> None:
    worst = worst_of_many(harnesses(device), partial(shown, oracle(path)), path, few=device == "twin")
    print(f"{device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


def test_sizes_equal_the_processors(path: Path, count: int = 2000) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    made, rng = image_processor(load_config(path), {}), np.random.default_rng(0)
    for _ in range(count):
        height, width = (int(n) for n in np.exp(rng.uniform(np.log(28), np.log(3000), 2)))
        want = smart_resize(height, width, 28, made.min_pixels, made.max_pixels)
        found = made.compute_geometry(height, width)
        patches = want[0] * want[1] // 196
        assert found.resized == want and found.tokens == patches // 4 and found.slots == -(-patches // 64) * 64


@pytest.mark.long
def test_twenty_thousand_sizes(path: Path) -> None:
    test_sizes_equal_the_processors(path, 20_000)


def same_pixels(path: Path, count: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference, ours = Qwen2VLImageProcessorPil.from_pretrained(path), image_processor(load_config(path), {})
    for seed in range(count):
        image = make_image(np.random.default_rng(seed), high=900)
        want, found = reference(images=[image], return_tensors="np"), ours.prepare(image, "d")
        assert tuple(want["image_grid_thw"][0]) == found.grid
        channels = np.repeat(np.arange(3), 392)
        assert (ours.normalised_values[channels, found.pixels] == want["pixel_values"]).all()


def test_pixels_equal_the_processors_bit_for_bit(path: Path) -> None:
    same_pixels(path, 6)


@pytest.mark.long
def test_pixels_of_two_hundred_images(path: Path) -> None:
    same_pixels(path, 200)


def chats(folder: Path, seeds: range, **flags: Any) -> None:
    """Ids equal, and the same tokens as transformers."""
    oracle = Oracle(folder, min_pixels=56 * 56, max_pixels=160_000)
    llm = LLM(str(folder), **{**BASE, **flags})
    try:
        requested = []
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), high=300)
            inputs = oracle.inputs(messages, images)
            requested.append((messages, inputs, oracle.answer(inputs, 6)))
        got = llm.chat([m for m, _, _ in requested], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        for output, (_, inputs, _) in zip(got, requested, strict=True):
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert sum(o.num_image_tokens > 0 for o in got) >= len(got) // 2
        assert_same([(o.outputs[0].token_ids, answer) for o, (_, _, answer) in zip(got, requested, strict=True)])
        llm.engine.scheduler.check()
    finally:
        llm.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_chats_answer_as_transformers(variant: str, checkpoint: Any, monkeypatch: Any) -> None:
    """A share: one form under each schedule and device."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    form = list(FORMS)[list(VARIANTS).index(variant) % len(FORMS)]
    chats(checkpoint("qwen2_vl", **FORMS[form]), range(4), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMS)
def test_forty_chats(variant: str, form: str, checkpoint: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(checkpoint("qwen2_vl", **FORMS[form]), range(100, 140), **VARIANTS[variant])


@pytest.mark.long
def test_forty_chats_on_two_ranks(checkpoint: Any) -> None:
    chats(checkpoint("qwen2_vl"), range(100, 140), tensor_parallel_size=2)


def test_a_clip_answers_as_transformers(path: Path) -> None:
    """A clip of four frames, a list of images: two items, positions by temporal patch."""
    limits: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 50_176}
    rng = np.random.default_rng(5)
    frames = [Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)) for _ in range(4)]
    oracle = Oracle(path, **limits)
    inputs = video_inputs(oracle, chat("clip"), *qwen_vl_utils.of_list(frames, **limits))
    del inputs["second_per_grid_ts"]  # transformers' Qwen2-VL has no such argument
    answer = oracle.answer(inputs, 6)
    llm = LLM(str(path), **{**BASE, "mm_processor_kwargs": limits})
    try:
        got = llm.chat([chat(frames, **limits)], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0]
        assert got.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert_same([(got.outputs[0].token_ids, answer)])
    finally:
        llm.close()


MISTAKES: dict[str, Callable[[FamilyHarness, Any], None]] = {}


def mistake(name: str) -> Callable[[Callable[[FamilyHarness, Any], None]], Callable[[FamilyHarness, Any], None]]:
    def note(plant: Callable[[FamilyHarness, Any], None]) -> Callable[[FamilyHarness, Any], None]:
        MISTAKES[name] = plant
        return plant

    return note


@mistake("padding counted as real")
def _counts(harness: FamilyHarness, patch: Any) -> None:
    pack = harness.model.pack

    def sloppy(images: Any, slots: int) -> Any:
        inputs = pack(images, slots)
        inputs.count = np.minimum(inputs.count + 1, 64).astype(np.int32)
        return inputs

    patch.setattr(harness.model, "pack", sloppy)


@mistake("rows of positions for columns")
def _turned(harness: FamilyHarness, patch: Any) -> None:
    right = patch_packing.patch_coordinates
    patch.setattr(patch_packing, "patch_coordinates", lambda h, w, merge: right(h, w, merge)[:, ::-1])


@mistake("attention inside windows")
def _windows(harness: FamilyHarness, patch: Any) -> None:
    for block in harness.model.tower.blocks:
        patch.setattr(block, "attend", harness.backend.ops.attend_windows)


@mistake("gelu for quick_gelu")
def _act(harness: FamilyHarness, patch: Any) -> None:
    patch.setattr(harness.model.tower.blocks[1].mlp, "act", "gelu")


@mistake("raster order for cells")
def _raster(harness: FamilyHarness, patch: Any) -> None:
    def raster(h: int, w: int, merge: int) -> Any:
        return np.stack(np.divmod(np.arange(h * w), w), 1).astype(np.int32)

    patch.setattr(patch_packing, "patch_coordinates", raster)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, harnesses: Any, oracle: Any, path: Path, monkeypatch: Any) -> None:
    harness, rng = harnesses("cpu"), np.random.default_rng(2)
    MISTAKES[name](harness, monkeypatch)
    assert not harness.worst([shown(oracle(path), 10, 14, rng)], rng) < 10 * BAR


def test_time_counts_patches_and_not_seconds(path: Path) -> None:
    """Qwen2.5-VL's joiner spreads a clip's patches by its rate, Qwen2-VL's by one."""
    from trencadis.core.media_spans import MediaSpan
    from trencadis.multimodal.qwen2_vl.mrope import mrope_positions_by_frames, mrope_positions_by_seconds

    tower, spans = load_config(path).vision, [MediaSpan(2, 12, "", (3, 4, 4), 192)]
    counted, _ = mrope_positions_by_frames(16, spans, tower, [1.5])  # type: ignore[arg-type]
    timed, _ = mrope_positions_by_seconds(16, spans, tower, [1.5])  # type: ignore[arg-type]
    assert counted[0, 2:14].tolist() == [2] * 4 + [3] * 4 + [4] * 4
    assert timed[0, 2:14].tolist() == [2] * 4 + [5] * 4 + [8] * 4


@pytest.mark.parametrize(("key", "value", "wanted"), [
    ("vision_config.hidden_act", "gelu", "right"), ("vision_config.hidden_act", "elu", "refused"),
    ("vision_config.mlp_ratio", 3, "refused"), ("vision_config.mlp_ratio", 0, "refused"),
    ("vision_config.depth", 2, "right"), ("vision_config.depth", 4, "refused"),
    ("vision_config.embed_dim", 40, "refused"), ("vision_config.num_heads", 4, "right"),
    ("vision_config.num_heads", 3, "refused"), ("vision_config.hidden_size", 128, "refused"),
    ("vision_config.patch_size", 16, "refused"), ("vision_config.spatial_merge_size", 1, "refused"),
    ("vision_config.hidden_act", GONE, "right"), ("vision_config.rope_parameters.rope_theta", 500.0, "right"),
])  # fmt: skip
def test_an_altered_key_is_right_or_refused(key: str, value: Any, wanted: str, path: Path, tmp_path: Path) -> None:
    case = Case(altered(path, tmp_path / "altered", "config.json", key, value), path)
    found = verdict(case.ours, case.reference, key)
    assert found.split(":")[0].replace("refused without the key", "refused") == wanted, found


def test_windows_are_refused_where_there_are_none(path: Path) -> None:
    for ask in (image_needs, image_processor):
        with pytest.raises(StartupError, match="has no windows; use pad"):
            ask(load_config(path), {}, "resize")


def test_the_ledger_counts_the_weights_exactly(path: Path) -> None:
    from trencadis.backends.cpu import make_backend
    from trencadis.core.device.backend import BackendConfig
    from trencadis.core.memory.memory_estimator import MemoryEstimator
    from trencadis.core.models.model_loader import load_model

    config = load_config(path)
    model: Any = load_model(config, make_backend(BackendConfig(options={"threads": "1", "ops": "reference"})))
    text = replace(config, vision=None)
    bare = MemoryEstimator(config, 4).weights() - MemoryEstimator(text, 4).weights() - config.vision.tables()  # type: ignore[union-attr]
    assert bare == model.tower.nbytes()
