"""Qwen3-VL against transformers: sizes, ids, pixels, the tower on every device, whole chats, mistakes, altered keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hostile.altered_config import GONE, Case, altered, verdict
from tests.oracles.reference_towers import normalised
from tests.oracles.transformers_model import Oracle, assert_same, conversation, make_image
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness, Shown, worst_of_many, worst_packing
from tests.vision.vision_checkpoints import qwen3_vl
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.pixel_normalisation_and_fixed_point import IMAGENET_STANDARD
from trencadis.multimodal.qwen3_vl import config as table_places

BAR = 1e-5
APART = ((1, 10, 18), (1, 4, 6))
"""An image, and a video of one temporal patch: further ones stand behind text."""

LARGEST = 8 * 4096
LIMITS: dict[str, Any] = {"min_pixels": 64 * 64, "max_pixels": 160_000}
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256,
    mm_processor_kwargs=LIMITS,
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": True, "seed": 2},
    "gqa 7, tied, three deep": {
        "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True, "seed": 3,
        "num_hidden_layers": 2, "vision": {"deepstack_visual_indexes": [0, 1, 3]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"), **FORMS[name]))


@pytest.fixture(scope="module")
def path(form: Callable[[str], Path]) -> Path:
    return form("dense")


def shown(model: Any, h: int, w: int, rng: np.random.Generator) -> Shown:
    """An image of h x w patches and its rows in transformers."""
    pixels = rng.integers(0, 256, (h * w, 1536), dtype=np.uint8)
    with torch.no_grad():
        made = model.model.visual(
            normalised(pixels, (IMAGENET_STANDARD.mean, IMAGENET_STANDARD.std)), grid_thw=torch.tensor([[1, h, w]])
        )
    want = torch.cat([made.pooler_output, *made.deepstack_features], 1)
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

    config = load_config(path)
    made, rng, needs = image_processor(config, {}), np.random.default_rng(0), image_needs(config, {})
    for _ in range(count):
        height, width = (int(n) for n in np.exp(rng.uniform(np.log(32), np.log(3000), 2)))
        want = smart_resize(height, width, 32, made.min_pixels, made.max_pixels)
        found = made.compute_geometry(height, width)
        patches = want[0] * want[1] // 256
        assert found.resized == want and found.tokens == patches // 4 and found.slots == -(-patches // 64) * 64
        assert found.slots <= needs.slots and found.tokens <= needs.tokens


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
        channels = np.repeat(np.arange(3), 512)
        assert (ours.normalised_values[channels, found.pixels] == want["pixel_values"]).all()


def test_pixels_equal_the_processors_bit_for_bit(path: Path) -> None:
    same_pixels(path, 6)


@pytest.mark.long
def test_pixels_of_two_hundred_images(path: Path) -> None:
    same_pixels(path, 200)


def same_places(count: int) -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    rng = np.random.default_rng(0)
    for _ in range(count):
        side, (h, w) = int(rng.integers(2, 60)), (2 * rng.integers(1, 70, 2)).tolist()
        near, share = table_places.interpolated_positions(h, w, side, 2)
        rows, shares = get_vision_interpolation_indices_and_weights(
            torch.tensor([[1, h, w]]), side, align_corners=True, spatial_merge_size=2
        )
        assert (near == rows.numpy()).all() and (share == shares.numpy()).all()


def test_places_in_the_table_equal_transformers_bit_for_bit() -> None:
    same_places(20)


@pytest.mark.long
def test_places_of_two_thousand_grids() -> None:
    same_places(2000)


def chats(folder: Path, seeds: range, **flags: Any) -> None:
    """Ids equal, and the same tokens as transformers."""
    oracle = Oracle(folder, **LIMITS)
    llm = LLM(str(folder), **{**BASE, **flags})
    try:
        requested = []
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), low=32, high=300)
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


@pytest.mark.parametrize("variant", ["padded, chunks of 7", "arena of two", "emulated hpu"])
def test_chats_answer_as_transformers(variant: str, form: Any, monkeypatch: Any) -> None:
    """A share: each form once, on one of the schedules and devices."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(form(list(FORMS)[list(VARIANTS).index(variant) % len(FORMS)]), range(4), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_forty_chats(variant: str, name: str, form: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(form(name), range(100, 140), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_forty_chats_on_two_ranks(name: str, form: Any) -> None:
    if name.startswith("gqa 7"):
        pytest.skip("seven heads do not divide")
    chats(form(name), range(100, 140), tensor_parallel_size=2)


def test_experts_as_the_hub_stores_them_are_turned(form: Any, tmp_path: Path) -> None:
    """The published files hold experts [in, out]; transformers 5 writes [out, in]."""
    from trencadis.backends.cpu import make_backend
    from trencadis.core.device.backend import BackendConfig
    from trencadis.core.models.model_loader import load_model

    folder = form("experts")
    tensors = load_file(folder / "model.safetensors")
    turned = {k: t.transpose(1, 2).contiguous() if ".experts." in k else t for k, t in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    held: list[Any] = []
    for place in (folder, tmp_path):
        backend = make_backend(BackendConfig(options={"threads": "1", "ops": "reference"}))
        held.append(load_model(load_config(place), backend).layers[0].mlp.weights)  # type: ignore[attr-defined]
    assert torch.equal(held[0].gate_up, held[1].gate_up) and torch.equal(held[0].down, held[1].down)


MISTAKES: dict[str, Callable[[FamilyHarness, Any], None]] = {}


def mistake(name: str) -> Callable[[Callable[[FamilyHarness, Any], None]], Callable[[FamilyHarness, Any], None]]:
    def note(plant: Callable[[FamilyHarness, Any], None]) -> Callable[[FamilyHarness, Any], None]:
        MISTAKES[name] = plant
        return plant

    return note


@mistake("a part of a layer later")
def _later(harness: FamilyHarness, patch: Any) -> None:
    object.__setattr__(harness.model.tower.config, "deepstack_layers", (1, 2))


@mistake("parts that change places")
def _order(harness: FamilyHarness, patch: Any) -> None:
    patch.setattr(harness.model.tower, "mergers", [harness.model.tower.mergers[i] for i in (0, 2, 1)])


@mistake("the nearest position alone")
def _nearest(harness: FamilyHarness, patch: Any) -> None:
    right = table_places.interpolated_positions

    def whole(h: int, w: int, side: int, merge: int) -> Any:
        near, share = right(h, w, side, merge)
        return near, (share == share.max(1, keepdims=True)).astype(np.float32)

    patch.setattr(table_places, "interpolated_positions", whole)


@mistake("corners that are not the table's")
def _corners(harness: FamilyHarness, patch: Any) -> None:
    right = table_places.interpolate_axis
    patch.setattr(table_places, "interpolate_axis", lambda place, count, side: right(place, count + 1, side))
    patch.setattr(table_places, "interpolated_positions", table_places.interpolated_positions.__wrapped__)


@mistake("a table turned over")
def _turned(harness: FamilyHarness, patch: Any) -> None:
    table = harness.model.tower.patch_embed.position_table
    patch.setattr(
        harness.model.tower.patch_embed,
        "position_table",
        table.view(6, 6, -1).transpose(0, 1).reshape(36, -1).contiguous(),
    )


@mistake("patches without their bias")
def _bias(harness: FamilyHarness, patch: Any) -> None:
    patch.setattr(harness.model.tower.patch.weights[0], "bias", None)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, path: Path, oracle: Any, monkeypatch: Any) -> None:
    harness, rng = FamilyHarness(path, "padded", 256), np.random.default_rng(2)
    assert harness.worst([shown(oracle(path), 10, 14, rng)], rng) <= BAR
    MISTAKES[name](harness, monkeypatch)
    assert not harness.worst([shown(oracle(path), 10, 14, rng)], rng) < 10 * BAR


def logits_off(folder: Path, plant: Callable[[Any], None]) -> bool:
    """Whether a mistake in the decoder changes what a chat with an image is answered."""
    oracle = Oracle(folder, **LIMITS)
    messages, images = conversation(np.random.default_rng(6), low=32, high=200)
    assert images
    answer = oracle.answer(oracle.inputs(messages, images), 6)
    llm = LLM(str(folder), **BASE)
    try:
        plant(llm.engine.executor._rank.model)  # type: ignore[attr-defined]
        got = llm.chat([messages], SamplingParams(temperature=0, max_tokens=6, logprobs=5), use_tqdm=False)[0]
        first = got.outputs[0].logprobs[0]  # type: ignore[index]
        want = answer.logits[0].log_softmax(-1)
        return max(abs(one.logprob - float(want[token])) for token, one in first.items()) > 1e-3
    finally:
        llm.close()


def _nothing(model: Any) -> None:
    pass


def _one_layer_late(model: Any) -> None:
    model.layers.insert(0, model.layers.pop(1))


def _no_parts(model: Any) -> None:
    right = model.deepstack_add
    model.deepstack_add = lambda x, rows, arena: right(x, rows * 0, arena)


def _swapped(model: Any) -> None:
    right = model.deepstack_add
    model.deepstack_add = lambda x, rows, arena: right(x, (rows // 3) * 3 + (3 - rows % 3) % 3, arena)


def _halves(model: Any) -> None:
    rotary = model.enter.rotary
    rotary.axis = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 2, 2]))


@pytest.mark.parametrize(("plant", "shows"), [
    (_nothing, False), (_no_parts, True), (_swapped, True), (_halves, True), (_one_layer_late, True),
])  # fmt: skip
def test_a_mistake_in_the_decoder_shows(plant: Callable[[Any], None], shows: bool, path: Path) -> None:
    assert logits_off(path, plant) == shows


@pytest.mark.parametrize(("key", "value", "wanted"), [
    ("vision_config.hidden_act", "gelu", "right"), ("vision_config.hidden_act", "elu", "refused"),
    ("vision_config.depth", 3, "right"), ("vision_config.depth", 2, "refused"),
    ("vision_config.deepstack_visual_indexes", [0, 1], "right"),
    ("vision_config.deepstack_visual_indexes", [2, 0], "refused"),
    ("vision_config.deepstack_visual_indexes", [0, 4], "refused"),
    ("vision_config.num_position_embeddings", 35, "refused"), ("vision_config.num_position_embeddings", 25, "refused"),
    ("vision_config.num_heads", 4, "right"), ("vision_config.num_heads", 5, "refused"),
    ("vision_config.patch_size", 14, "refused"), ("vision_config.spatial_merge_size", 1, "refused"),
    ("vision_config.out_hidden_size", 32, "refused"), ("vision_config.hidden_act", GONE, "right"),
    ("vision_config.rope_parameters.rope_theta", 500.0, "right"),
    ("text_config.rope_parameters.mrope_section", [2, 3, 3], "right"),
    ("text_config.rope_parameters.mrope_section", [2, 3, 4], "refused"),
    ("text_config.rope_parameters.mrope_interleaved", False, "right"),
    ("text_config.head_dim", 32, "refused"), ("text_config", GONE, "refused"),
])  # fmt: skip
def test_an_altered_key_is_right_or_refused(key: str, value: Any, wanted: str, path: Path, tmp_path: Path) -> None:
    case = Case(altered(path, tmp_path / "altered", "config.json", key, value), path, APART)
    found = verdict(case.ours, case.reference, key)
    assert found.split(":")[0].replace("refused without the key", "refused") == wanted, found


def test_a_processor_of_other_patches_is_refused(path: Path, tmp_path: Path) -> None:
    from trencadis.core.errors import StartupError

    folder = altered(path, tmp_path / "altered", "preprocessor_config.json", "patch_size", 14)
    with pytest.raises(StartupError, match="patch_size is 14; implemented: 16"):
        image_processor(load_config(folder), {})
    held = json.loads((folder / "preprocessor_config.json").read_text())
    del held["patch_size"]
    (folder / "preprocessor_config.json").write_text(json.dumps(held))
    with pytest.raises(StartupError, match="patch_size is missing"):
        image_processor(load_config(folder), {})


CHECKS = {"cpu": ("op.interpolate",), "hpu": ("op.interpolate",), "twin": ("op.interpolate",)}


def checks(device: str, path: Path, only: tuple[str, ...]) -> None:
    from trencadis.backends.conformance import check_suite
    from trencadis.backends.conformance.backend_under_test import make_target
    from trencadis.backends.conformance.check_result import line

    policy = {"cpu": "padded", "twin": "twin"}.get(device, "")
    made = make_target("cuda" if device == "twin" else device, path, policy=policy, quick=True)
    report = check_suite.run(made, only)
    assert not report.failures() and report.count("pass") == len(only), "\n".join(line(r) for r in report.results)


@pytest.mark.parametrize("device", CHECKS)
def test_checks_of_a_backend_pass(device: str, path: Path, monkeypatch: Any) -> None:
    """The interpolation; a long test checks the padding of its inputs, and of every part of a row."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    checks(device, path, CHECKS[device])


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_padding_is_inert(device: str, path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    more = ("replay",) if device == "hpu" else ()
    checks(device, path, ("padding", "op.attend_images", "op.rope_vision", *more))
