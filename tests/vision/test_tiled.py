"""Families of tiles against transformers: sizes, pixels, the tower on every device, chats, mistakes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.altered_config import altered
from tests.oracles.transformers_model import assert_same, conversation, make_image
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness
from tests.vision.tiled_families import COMPARED, ask, prepared, rows_of_transformers, same_values, worst_row
from trencadis import LLM, SamplingParams
from trencadis.core.buckets import ENCODER_SLOTS, Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.launches.pending_step import PendingStep
from trencadis.core.models.decoder import Decoder
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import Encode

BAR = 1e-5
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=2048, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256
)
FAMILIES = list(COMPARED)
EACH = [(family, form) for family in FAMILIES for form in COMPARED[family].forms]
FIRST = [(family, next(iter(COMPARED[family].forms))) for family in FAMILIES]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``made(family, form)``: its folder."""
    return cache(
        lambda family, form: COMPARED[family].write(tmp_path_factory.mktemp(family), **COMPARED[family].forms[form])
    )


@pytest.fixture(scope="module")
def harnesses(made: Any) -> Callable[[str, str, str], FamilyHarness]:
    def harness(family: str, form: str, device: str) -> FamilyHarness:
        side = getattr(load_config(made(family, form)).vision, "side", 7)
        return FamilyHarness(made(family, form), device, 4096, side**2 + 1)

    return cache(harness)


def packings(family: str, path: Path, harness: FamilyHarness, model: Any, count: int, seed: int) -> float:
    rng, worst = np.random.default_rng(seed), 0.0
    for _ in range(count):
        shown = [make_image(rng, high=400) for _ in range(int(rng.integers(1, 4)))]
        pairs = [(prepared(path, p), rows_of_transformers(COMPARED[family], path, model, p)) for p in shown]
        while sum(one.slots for one, _ in pairs) > 3840:
            pairs.pop()
        worst = max(worst, worst_row(harness, pairs, rng, 64 * int(rng.integers(0, 4))))
    return worst


@pytest.mark.parametrize(("family", "form"), FIRST)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_tower_equal_transformers(
    family: str, form: str, device: str, harnesses: Any, oracle: Any, made: Any
) -> None:
    path = made(family, form)
    worst = packings(family, path, harnesses(family, form, device), oracle(path), 1, 1)
    print(f"{family}, {device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


@pytest.mark.long
@pytest.mark.parametrize(("family", "form"), EACH)
@pytest.mark.parametrize("device", DEVICES)
def test_two_hundred_images(family: str, form: str, device: str, harnesses: Any, oracle: Any, made: Any) -> None:
    path = made(family, form)
    worst = packings(family, path, harnesses(family, form, device), oracle(path), 10 if device == "twin" else 34, 4)
    print(f"{family} {form}, {device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


@pytest.mark.parametrize(("family", "form"), FIRST)
def test_pixels_equal_the_processors_bit_for_bit(family: str, form: str, made: Any) -> None:
    for seed in range(6):
        same_values(COMPARED[family], made(family, form), make_image(np.random.default_rng(seed), high=500))


@pytest.mark.long
@pytest.mark.parametrize(("family", "form"), EACH)
def test_pixels_of_two_hundred_images(family: str, form: str, made: Any) -> None:
    for seed in range(200):
        same_values(COMPARED[family], made(family, form), make_image(np.random.default_rng(seed), high=3000))


def same_sizes(family: str, path: Path, count: int) -> None:
    """Tokens of random sizes, aspects up to 200."""
    rng, ours = np.random.default_rng(5), image_processor(load_config(path), {})
    reference = COMPARED[family].processor(path)
    for _ in range(count):
        height = int(np.exp(rng.uniform(0, np.log(6000))))
        width = int(np.clip(height * np.exp(rng.uniform(-np.log(200), np.log(200))), -(-height // 200), 200 * height))
        made = ours.compute_geometry(height, width)
        assert made.tokens == COMPARED[family].tokens(reference, ours, height, width), (height, width)
        assert made.slots == made.grid[0] * made.item.slots and made.item.slots % 64 == 0


@pytest.mark.parametrize(("family", "form"), FIRST)
def test_tokens_of_sizes_equal_the_processors(family: str, form: str, made: Any) -> None:
    same_sizes(family, made(family, form), 300)


@pytest.mark.long
@pytest.mark.parametrize(("family", "form"), EACH)
def test_tokens_of_twenty_thousand_sizes(family: str, form: str, made: Any) -> None:
    same_sizes(family, made(family, form), 20_000)


def chats(family: str, path: Path, oracle: Any, seeds: range, **flags: Any) -> None:
    reference = COMPARED[family].processor(path)
    llm = LLM(str(path), **{**BASE, **flags})
    try:
        conversations, wanted = [], []
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), high=300)
            text = reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            conversations.append(messages)
            wanted.append(ask(COMPARED[family], path, oracle(path), text, images, 6))
        got = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        assert [o.prompt_token_ids for o in got] == [ids for ids, _ in wanted]
        assert sum(o.num_image_tokens > 0 for o in got) >= len(got) // 2
        assert_same([(o.outputs[0].token_ids, answer) for o, (_, answer) in zip(got, wanted, strict=True)])
        llm.engine.scheduler.check()
    finally:
        llm.close()


ALIKE = ("smolvlm", "pixtral")
"""Families that share another one's code."""

SHARE = [
    (family, variant)
    for i, family in enumerate(FAMILIES)
    for k, variant in enumerate(VARIANTS)
    if k == (i + 2) % 5 or (k == i % 5 and family not in ALIKE)
]


@pytest.mark.parametrize(("family", "variant"), SHARE)
def test_chats_answer_as_transformers(family: str, variant: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    """A share: one or two schedules or devices a family."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(family, made(family, next(iter(COMPARED[family].forms))), oracle, range(3), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize(("family", "form"), EACH)
@pytest.mark.parametrize("variant", [*VARIANTS, "two ranks"])
def test_forty_chats(family: str, form: str, variant: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    flags = VARIANTS.get(variant, {"tensor_parallel_size": 2})
    chats(family, made(family, form), oracle, range(100, 140), **{**flags, "max_model_len": 2048})


MISTAKES = [(family, form, name) for family, form in FIRST for name in COMPARED[family].mistakes]


@pytest.mark.parametrize(("family", "form", "name"), MISTAKES)
def test_a_mistake_shows(
    family: str, form: str, name: str, harnesses: Any, oracle: Any, made: Any, monkeypatch: Any
) -> None:
    path, harness = made(family, form), harnesses(family, form, "cpu")
    image = make_image(np.random.default_rng(2), low=100, high=300)
    pair = prepared(path, image), rows_of_transformers(COMPARED[family], path, oracle(path), image)
    assert worst_row(harness, [pair], np.random.default_rng(0)) <= BAR
    monkeypatch.setattr(*COMPARED[family].mistakes[name](harness.model, harness.backend.ops))
    assert not worst_row(harness, [pair], np.random.default_rng(0)) < 10 * BAR


ALTERED = [("config.json", f, *one) for f in FAMILIES for one in COMPARED[f].altered]
ALTERED += [("preprocessor_config.json", f, *one) for f in FAMILIES for one in COMPARED[f].settings]


@pytest.mark.parametrize(("file", "family", "key", "value", "named"), ALTERED)
def test_a_value_that_is_not_implemented_is_refused(
    file: str, family: str, key: str, value: Any, named: str, made: Any, tmp_path: Path
) -> None:
    folder = altered(made(family, next(iter(COMPARED[family].forms))), tmp_path / "altered", file, key, value)
    with pytest.raises(StartupError) as refused:
        image_processor(load_config(folder), {})
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("family", "form"), FIRST)
def test_options_and_shapes_that_do_not_apply_are_refused(family: str, form: str, made: Any) -> None:
    config = load_config(made(family, form))
    with pytest.raises(StartupError, match="max_pixels does not apply"):
        image_needs(config, {"max_pixels": 50_000})
    with pytest.raises(StartupError, match="no windows"):
        image_needs(config, {}, "resize")
    with pytest.raises(BadRequest, match="aspect ratio"):
        image_processor(config, {}).compute_geometry(1, 10_000)


@pytest.mark.parametrize(("family", "form"), FIRST)
def test_no_number_of_tiles_misses(family: str, form: str, made: Any) -> None:
    """Launches of multiples of the tile; an image of more tiles than the largest launch is spread over several."""
    from trencadis.backends.hpu.shape_policy import policy

    config = load_config(made(family, form))
    needs = image_needs(config, {})
    if not needs.tile:
        pytest.skip("its images have any size")
    plan = make_plan(
        policy(""), ShapeLimits(16, 2048, 2048, 128, needs.slots, needs.tile, needs.tile), BucketOptions(), config
    )
    sizes = plan.sizes(Stage.VISION)
    assert all(size % needs.tile == 0 for size in sizes)
    packer = ImagePacker(plan, ENCODER_SLOTS)
    for count in (1, 2, 3, 5, 13, 40, 101):
        waiting = [needs.tile] * count
        while waiting:
            chosen = packer.choose(waiting)
            assert chosen and plan.is_within_boundaries(Stage.VISION, (needs.tile * len(chosen),))
            waiting = waiting[len(chosen) :]


@pytest.mark.parametrize(("family", "form"), FIRST)
def test_weights_are_counted_exactly(family: str, form: str, made: Any, harnesses: Any) -> None:
    """What plans say of the tower is what the loaded model holds."""
    config, model = load_config(made(family, form)), harnesses(family, form, "cpu").model
    assert config.vision is not None
    assert 4 * config.vision.count_rank_weights(1) == model.nbytes() - Decoder.nbytes(model)


@pytest.mark.parametrize(("family", "form"), FIRST)
def test_a_raw_prompt_with_a_file_answers_as_transformers(family: str, form: str, made: Any, oracle: Any) -> None:
    """A file is decoded by a worker, to which the processor travels as JSON and which tells no digest of a tile."""
    path, image, mark = made(family, form), make_image(np.random.default_rng(8), high=300), COMPARED[family].image
    text = f"USER: {mark}\nWhat is in the image? ASSISTANT:"
    ids, answer = ask(COMPARED[family], path, oracle(path), text, [image], 6)
    file = BytesIO()
    image.save(file, "PNG")
    llm = LLM(str(path), **BASE)
    try:
        params = SamplingParams(temperature=0, max_tokens=6)
        got = llm.generate({"prompt": text, "multi_modal_data": {"image": file.getvalue()}}, params, use_tqdm=False)[0]
        assert got.prompt_token_ids == ids and got.num_image_tokens == prepared(path, image).tokens
        assert_same([(got.outputs[0].token_ids, answer)])
        with pytest.raises(BadRequest, match=r"placed 2 of 1 images|names 2 images and has 1"):
            more = (COMPARED[family].another or mark) + text
            llm.generate({"prompt": more, "multi_modal_data": {"image": image}}, params, use_tqdm=False)
    finally:
        llm.close()


def test_other_parts_of_a_processor_are_no_settings(made: Any, tmp_path: Path) -> None:
    """Hub checkpoints have a processor_config.json that says nothing of the image processor beside the older file."""
    path = made("llava_next", "llama")
    folder = altered(path, tmp_path / "altered", "processor_config.json", "patch_size", 14)
    assert image_processor(load_config(folder), {}) == image_processor(load_config(path), {})
    moved = altered(folder, tmp_path / "moved", "preprocessor_config.json", "image_processor_type", "none")
    with pytest.raises(StartupError, match="image_processor_type"):
        image_processor(load_config(moved), {})
    (moved / "preprocessor_config.json").unlink()
    with pytest.raises(StartupError, match="nor an image_processor"):
        image_processor(load_config(moved), {})


@pytest.mark.parametrize(("family", "form"), [*FIRST, ("idefics3", "cells of 9")])
def test_real_slots_of_many_items_are_counted(family: str, form: str, made: Any, harnesses: Any) -> None:
    """Cells need not divide a window, and rows of tiles stand closer than their slots."""
    harness = harnesses(family, form, "cpu")
    one = prepared(made(family, form), make_image(np.random.default_rng(3), high=200))
    tile = (one.items or (one,))[0]
    items = [
        Encode(str(i), tile.grid, tile.slots, tile.pixels, np.arange(tile.tokens, dtype=np.int32) + 3)
        for i in range(16)
    ]
    pending = PendingStep(1, {})
    ModelRunner(harness.backend, harness.model, harness.plan)._encode(
        items, Bucket(Stage.VISION, (17 * tile.slots,)), pending
    )
    stats = pending.stats[0]
    seen = getattr(harness.model.tower, "class_token", False)
    assert (stats.real, stats.items, stats.needed) == (16 * (len(tile.pixels) + seen), 16, 16 * tile.slots)
