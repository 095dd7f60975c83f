"""LFM2-VL: sizes, tiles and pixels of images, rows of the tower on every device, greedy answers, keys refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.oracles import lfm2_vl_images
from tests.oracles.transformers_model import make_image
from tests.vision import vision_checkpoints
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness
from tests.vision.tiled_families import worst_row
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor, image_sizes
from trencadis.core.errors import BadRequest, StartupError
from trencadis.multimodal.lfm2_vl.config import resized_positions

FORMS: dict[str, dict[str, Any]] = {
    "tiles": {},
    "cells of 16, no norm, one KV head": {
        "own": {"downsample_factor": 4, "projector_use_layernorm": False, "projector_bias": False},
        "images": {"tile_size": 128, "max_image_tokens": 8, "use_thumbnail": False}, "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 4, "seed": 2,
    },
    "whole, tied": {
        "images": {"do_image_splitting": False}, "tie_word_embeddings": True, "seed": 3,
        "block_auto_adjust_ff_dim": False,
    },
}  # fmt: skip
NAMES = tuple(FORMS)
SIZES = ((40, 300), (84, 84), (140, 56), (500, 333), (60, 401), (11, 11), (97, 95), (301, 299), (5, 41), (640, 480))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda form: vision_checkpoints.lfm2_vl(tmp_path_factory.mktemp("lfm2_vl"), **FORMS[form]))


def settings_of(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((path / "preprocessor_config.json").read_text())
    return held


@pytest.mark.parametrize("form", FORMS)
def test_sizes_tiles_and_pixels_are_transformers(form: str, made: Any) -> None:
    """Of odd sizes, too. Pillow and torch round differently: a value may differ by one."""
    path, rng = made(form), np.random.default_rng(0)
    config, settings = load_config(path), settings_of(path)
    ours, rule = image_processor(config, {}), image_sizes(config, {})
    sizes = (*SIZES, *(tuple(int(n) for n in rng.integers(8, 700, 2)) for _ in range(8)))
    for height, width in sizes:
        if max(height, width) > 9 * min(height, width):
            continue
        image = np.asarray(make_image(rng).resize((width, height)))
        tiles, rows, columns, whole = lfm2_vl_images.split(settings, image)
        one, geometry = ours.prepare(Image.fromarray(image), "d"), rule(height, width)
        items = one.items or (one,)
        assert len(items) == len(tiles) == len(geometry.all_items) and geometry.slots == sum(i.slots for i in items)
        assert one.tokens == sum(item.tokens for item in items)
        if rows * columns == 1:
            assert list(one.resized) == whole
        for item, tile in zip(items, tiles, strict=True):
            assert item.grid == (1, tile.shape[1] // 16, tile.shape[2] // 16), (height, width)
            want = ours.cut_patches(tile.permute(1, 2, 0).numpy())
            assert np.abs(item.pixels.astype(int) - want.astype(int)).max() <= 1, (height, width)
        named = [piece for piece in one.layout if isinstance(piece, str)]
        assert named[0].startswith("<|image_start|>") and named[-1] == "<|image_end|>"
        assert ("<|img_thumbnail|>" in named) == (len(items) > rows * columns)
        assert f"<|img_row_{rows}_col_{columns}|>" in "".join(named) or rows * columns == 1


@pytest.mark.parametrize("size", [(70, 1500), (1200, 66), (3000, 90)])
def test_a_long_image_without_a_thumbnail_is_cut(size: tuple[int, int], made: Any) -> None:
    """As a whole it would be refused, but it is not shown whole."""
    path, (height, width) = made(NAMES[1]), size
    image = np.asarray(make_image(np.random.default_rng(1)).resize((width, height)))
    tiles, rows, columns, _ = lfm2_vl_images.split(settings_of(path), image)
    one = image_processor(load_config(path), {}).prepare(Image.fromarray(image), "d")
    assert len(one.items) == len(tiles) == rows * columns > 1
    assert [item.grid for item in one.items] == [(1, tile.shape[1] // 16, tile.shape[2] // 16) for tile in tiles]


@pytest.mark.parametrize(("side", "h", "w"), [
    (4, 2, 8), (4, 4, 4), (4, 4, 10), (4, 12, 6), (4, 24, 24), (8, 16, 2), (1, 2, 2), (1, 4, 30), (2, 2, 2), (2, 2, 40),
    (3, 4, 2), (3, 2, 4), (5, 6, 2), (7, 6, 8), (16, 2, 90),
])  # fmt: skip
def test_positions_are_resized_as_transformers_resizes_them(side: int, h: int, w: int) -> None:
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    table = torch.randn(side, side, 8, generator=torch.Generator().manual_seed(0))
    near, share = resized_positions(h, w, side, 2)
    assert near.shape == (h * w, 2 * side)
    got = (table.view(-1, 8)[torch.from_numpy(near).long()] * torch.from_numpy(share)[..., None]).sum(1)
    resized = Siglip2VisionEmbeddings.resize_positional_embeddings(table, torch.tensor([[h, w]]).long(), h * w)  # type: ignore[arg-type]
    by_cell = resized[0].view(h // 2, 2, w // 2, 2, 8).permute(0, 2, 1, 3, 4).reshape(-1, 8)
    assert (got - by_cell).abs().max() < 1e-6


@pytest.mark.parametrize(("form", "device"), [("tiles", d) for d in DEVICES] + [(NAMES[1], "cpu")])
def test_rows_of_the_tower_equal_transformers(form: str, device: str, made: Any, oracle: Any) -> None:
    path, rng = made(form), np.random.default_rng(2)
    model, config = oracle(path), load_config(path)
    harness, some = FamilyHarness(path, device, 1024, 20), []
    for height, width in ((70, 41), (130, 301), (33, 200)):
        one = image_processor(config, {}).prepare(make_image(rng).resize((width, height)), "d")
        given = lfm2_vl_images.model_inputs([one], config.vision.unit // 16)  # type: ignore[union-attr]
        with torch.no_grad():
            some.append((one, torch.cat(list(model.model.get_image_features(**given).pooler_output))))
    assert worst_row(harness, some, rng, 64) <= 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_logits_about_an_image_in_chunks_equal_transformers(form: str, made: Any, oracle: Any) -> None:
    path, rng = made(form), np.random.default_rng(4)
    model, config, harness = oracle(path), load_config(path), HandDrivenModel(path)
    one = image_processor(config, {}).prepare(make_image(rng).resize((219, 301)), "d")
    given = lfm2_vl_images.model_inputs([one], config.vision.unit // 16)  # type: ignore[union-attr]
    before, behind = rng.integers(0, 300, 40).tolist(), rng.integers(0, 300, 30).tolist()
    ids = [*before, *[vision_checkpoints.IMAGE] * one.tokens, *behind]
    with torch.no_grad():
        rows = torch.cat(list(model.model.get_image_features(**given).pooler_output))
        want = model(input_ids=torch.tensor([ids]), **given).logits[0]
    places = np.zeros(len(ids), np.int32)
    places[40 : 40 + one.tokens] = 2 + np.arange(one.tokens)
    for chunk in (1, 7, 90, len(ids)):
        harness.arena[2 : 2 + one.tokens] = rows
        got = harness.prefill(ids, chunk, rows=places)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def chats(path: Path, model: Any, seeds: range, **flags: Any) -> None:
    """Greedy answers about up to two images of random sizes, large and small ones."""
    rng, config = np.random.default_rng(seeds.start), load_config(path)
    llm = LLM(
        str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=32 << 20,
        limit_mm_per_prompt={"image": 2}, **{"max_num_batched_tokens": 96, "max_num_seqs": 4, **flags},
    )  # fmt: skip
    try:
        asked = [[make_image(rng, high=500, aspect=4) for _ in range(seed % 3)] for seed in seeds]
        messages = [
            [{"role": "user", "content": [
                *({"type": "image", "image": i} for i in some), {"type": "text", "text": "?"}]}]
            for some in asked
        ]  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        for out, some in zip(llm.chat(messages, params, use_tqdm=False), asked, strict=True):
            prepared = [image_processor(config, {}).prepare(image, "d") for image in some]
            given = lfm2_vl_images.model_inputs(prepared, config.vision.unit // 16) if some else {}  # type: ignore[union-attr]
            ids = torch.tensor([out.prompt_token_ids])
            with torch.inference_mode():
                want = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False,
                    eos_token_id=None, pad_token_id=1, **given,
                )  # fmt: skip
            assert list(out.outputs[0].token_ids) == want[0, ids.shape[1] :].tolist()
        llm.engine.scheduler.check()
    finally:
        llm.close()


@pytest.mark.parametrize(("form", "variant"), [
    ("tiles", "cpu"), (NAMES[1], "padded, chunks of 7"),
    pytest.param("tiles", "emulated hpu", marks=pytest.mark.long),
    pytest.param(NAMES[2], "cuda twin", marks=pytest.mark.long),
])  # fmt: skip
def test_answers_about_images_are_transformers_answers(
    form: str, variant: str, made: Any, oracle: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(made(form), oracle(made(form)), range(1, 4), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_long(form: str, variant: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(made(form), oracle(made(form)), range(100), **VARIANTS[variant])


def test_blank_thumbnails_of_other_shapes_are_other_items(made: Any) -> None:
    """They have the same bytes, but other positions."""
    config = load_config(made("tiles"))
    some = [image_processor(config, {}).prepare(Image.new("RGB", size), "d") for size in ((480, 320), (320, 480))]
    first, second = (one.items[-1] for one in some)
    assert first.grid == (1, *second.grid[:0:-1]) and first.digest != second.digest
    assert some[0].items[0].digest == some[1].items[0].digest


def test_needs_hold_the_largest_image(made: Any) -> None:
    config = load_config(made("tiles"))
    needs, rule = image_needs(config, {}), image_sizes(config, {})
    seen = [rule(h, w) for h in range(10, 2000, 130) for w in range(10, 2000, 90) if max(h, w) < 9 * min(h, w)]
    assert max(item.slots for one in seen for item in one.all_items) == needs.slots
    assert max(one.tokens for one in seen) <= needs.tokens
    with pytest.raises(BadRequest, match="too long"):
        rule(10, 2000)


@pytest.mark.parametrize(("part", "key", "value"), [
    ("", "downsample_factor", 3), ("vision_config", "num_patches", 15), ("vision_config", "num_attention_heads", 3),
    ("text_config", "conv_bias", True), ("text_config", "layer_types", ["mamba"] * 4),
    ("vision_config", "model_type", "siglip_vision_model"),
])  # fmt: skip
def test_keys_that_are_not_served_are_refused_by_name(made: Any, part: str, key: str, value: Any) -> None:
    with pytest.raises(StartupError, match=key) as found:
        load_config(made("tiles"), overrides={part: {key: value}} if part else {key: value})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("key", "value"), [
    ("resample", 3), ("tile_size", 48), ("min_tiles", 1), ("min_image_tokens", 2), ("max_image_tokens", 3),
    ("encoder_patch_size", 14), ("image_processor_type", "SiglipImageProcessor"), ("do_pad", False),
])  # fmt: skip
def test_settings_of_the_processor_are_refused_by_name(made: Any, tmp_path: Path, key: str, value: Any) -> None:
    path = made("tiles")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings_of(path) | {key: value}))
    with pytest.raises(StartupError, match=key):
        image_processor(load_config(tmp_path), {})
