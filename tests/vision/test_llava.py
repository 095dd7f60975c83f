"""LLaVA-1.5 against transformers: ids, pixels, the tower on every device, chats, raw prompts, mistakes, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.hostile.altered_config import altered
from tests.oracles.transformers_model import Answer, assert_same, conversation, make_image
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness, Shown
from tests.vision.vision_checkpoints import IMAGE, llava
from trencadis import LLM, SamplingParams
from trencadis.core.buckets import ENCODER_SLOTS, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits

BAR = 1e-5
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256
)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "first layer, gelu, gqa": {"layer": 1, "vision": {"hidden_act": "gelu"}, "num_key_value_heads": 1, "seed": 2},
    "336": {"image": 336, "seed": 3, "vision": {"layer_norm_eps": 1e-3}},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``made("plain")``: its folder."""
    return cache(lambda form: llava(tmp_path_factory.mktemp("llava"), **FORMS[form]))


@pytest.fixture(scope="module")
def harnesses(made: Any) -> Callable[[str], FamilyHarness]:
    return cache(lambda device: FamilyHarness(made("plain"), device, 2560))


def features(model: Any, values: Any) -> torch.Tensor:
    """transformers' rows of images' pixel values, float32 [tokens, hidden] of all together."""
    with torch.no_grad():
        found: torch.Tensor = torch.cat(list(model.get_image_features(pixel_values=values).pooler_output))
    return found


def shown(path: Path, model: Any, image: Image.Image) -> Shown:
    """An image, prepared here, and its rows in transformers."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    one = image_processor(load_config(path), {}).prepare(image, "d")
    values = CLIPImageProcessorPil.from_pretrained(path)(images=[image], return_tensors="pt")["pixel_values"]
    return Shown(one.grid, one.slots, one.pixels, features(model, values))


def packings(path: Path, harness: FamilyHarness, model: Any, count: int, seed: int) -> float:
    rng, worst = np.random.default_rng(seed), 0.0
    for _ in range(count):
        items = [shown(path, model, make_image(rng, high=400)) for _ in range(int(rng.integers(1, 6)))]
        worst = max(worst, harness.worst(items, rng, 64 * int(rng.integers(0, 4))))
    return worst


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_tower_equal_transformers(device: str, harnesses: Any, oracle: Any, made: Any) -> None:
    path = made("plain")
    worst = packings(path, harnesses(device), oracle(path), 2, 1)
    print(f"{device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_two_hundred_images(device: str, form: str, oracle: Any, made: Any) -> None:
    path = made(form)
    harness = FamilyHarness(path, device, 6400)
    worst = packings(path, harness, oracle(path), 10 if device == "twin" else 70, 4)
    print(f"{form}, {device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


def same_pixels(path: Path, count: int, high: int) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    reference, ours = CLIPImageProcessorPil.from_pretrained(path), image_processor(load_config(path), {})
    side = ours.image // 14
    for seed in range(count):
        image = make_image(np.random.default_rng(seed), high=high)
        want, found = reference(images=[image], return_tensors="np")["pixel_values"][0], ours.prepare(image, "d")
        cut = want.reshape(3, side, 14, side, 14).transpose(1, 3, 0, 2, 4).reshape(side * side, 588)
        assert (ours.normalised_values[np.repeat(np.arange(3), 196), found.pixels] == cut).all(), image.size
        assert found.tokens == side * side and found.grid == (1, side, side)


def test_pixels_equal_the_processors_bit_for_bit(made: Any) -> None:
    same_pixels(made("plain"), 8, 700)


@pytest.mark.long
def test_pixels_of_two_hundred_images(made: Any) -> None:
    same_pixels(made("336"), 200, 3000)


def ask(path: Path, model: Any, tokenizer: Any, text: str, images: list[Image.Image], length: int) -> Any:
    """(ids, transformers' answer) of a prompt with ``<image>`` for each image."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    count = json.loads((path / "config.json").read_text())["image_seq_length"]
    ids = tokenizer(text.replace("<image>", "<image>" * count), return_tensors="pt")["input_ids"]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        processor = CLIPImageProcessorPil.from_pretrained(path)
        given["pixel_values"] = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        out = model.generate(
            **given, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    logits = torch.stack([row[0].float() for row in out.logits])
    best = logits.topk(2).values
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), Answer(tokens, (best[:, 0] - best[:, 1]).tolist(), logits)


def chats(path: Path, oracle: Any, seeds: range, **flags: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    llm = LLM(str(path), **{**BASE, **flags})
    try:
        conversations, wanted = [], []
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), high=300)
            text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            conversations.append(messages)
            wanted.append(ask(path, oracle(path), tokenizer, text, images, 6))
        got = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        assert [o.prompt_token_ids for o in got] == [ids for ids, _ in wanted]
        assert sum(o.num_image_tokens > 0 for o in got) >= len(got) // 2
        assert_same([(o.outputs[0].token_ids, answer) for o, (_, answer) in zip(got, wanted, strict=True)])
        llm.engine.scheduler.check()
    finally:
        llm.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_chats_answer_as_transformers(variant: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    """A share: one form under each schedule and device."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    form = list(FORMS)[list(VARIANTS).index(variant) % 2]
    chats(made(form), oracle, range(4), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMS)
def test_forty_chats(variant: str, form: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(made(form), oracle, range(100, 140), **{**VARIANTS[variant], "max_model_len": 2048})


@pytest.mark.long
def test_forty_chats_on_two_ranks(made: Any, oracle: Any) -> None:
    chats(made("plain"), oracle, range(100, 140), tensor_parallel_size=2)


def test_a_raw_prompt_with_an_image_answers_as_transformers(made: Any, oracle: Any) -> None:
    """As in vLLM's examples: ``<image>`` in the text; each must have its image."""
    from transformers import AutoTokenizer

    path, rng = made("plain"), np.random.default_rng(7)
    image, tokenizer = make_image(rng, high=300), AutoTokenizer.from_pretrained(path)
    text = "USER: <image>\nWhat is in the image? ASSISTANT:"
    ids, answer = ask(path, oracle(path), tokenizer, text, [image], 6)
    assert ids.count(IMAGE) == 64
    llm = LLM(str(path), **BASE)
    try:
        params = SamplingParams(temperature=0, max_tokens=6)
        got = llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, params, use_tqdm=False)[0]
        assert got.prompt_token_ids == ids
        assert_same([(got.outputs[0].token_ids, answer)])
        # A file is decoded by a worker, to which the processor travels as JSON.
        file = BytesIO()
        image.save(file, "PNG")
        of_file = {"prompt": text, "multi_modal_data": {"image": file.getvalue()}}
        again = llm.generate(of_file, params, use_tqdm=False)[0]
        assert again.outputs[0].token_ids == got.outputs[0].token_ids and again.num_image_tokens == 64
        with pytest.raises(BadRequest, match="placed 2 of 1 images"):
            llm.generate({"prompt": f"<image>{text}", "multi_modal_data": {"image": image}}, params, use_tqdm=False)
    finally:
        llm.close()


CLASSLESS = (torch.arange(65) > 0).float()[:, None]
MISTAKES: dict[str, Callable[[Any, Any], tuple[Any, str, Any]]] = {
    "one layer too many": lambda model, ops: (model, "blocks", model.blocks + model.blocks[:1]),
    "one layer too few": lambda model, ops: (model, "blocks", model.blocks[:-1]),
    "no class token": lambda model, ops: (
        model.patch_embed,
        "position_table",
        model.patch_embed.position_table * CLASSLESS,
    ),
    "no norm before the layers": lambda model, ops: (model.patch_embed, "norm", lambda x: (x, x)),
    "gelu for quick_gelu": lambda model, ops: (model.blocks[1].mlp, "act", "gelu"),
    "silu in the projector": lambda model, ops: (model.projector, "act", "silu"),
    "windows": lambda model, ops: (model.blocks[0], "attend", ops.attend_windows),
}
"""What is changed of a model: (place, name, value)."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, harnesses: Any, oracle: Any, made: Any, monkeypatch: Any) -> None:
    path, harness, rng = made("plain"), harnesses("cpu"), np.random.default_rng(2)
    one = shown(path, oracle(path), make_image(rng, high=300))
    assert harness.worst([one], np.random.default_rng(0)) <= BAR
    monkeypatch.setattr(*MISTAKES[name](harness.model, harness.backend.ops))
    assert not harness.worst([one], np.random.default_rng(0)) < 10 * BAR


@pytest.mark.parametrize(("key", "value", "named"), [
    ("vision_feature_layer", 9, "vision_feature_layer"), ("vision_feature_layer", [-2, -3], "vision_feature_layer"),
    ("vision_feature_layer", 0, "vision_feature_layer"), ("vision_feature_select_strategy", "full", "strategy"),
    ("text_config.model_type", "opt", "model_type"), ("vision_config.model_type", "siglip_vision_model", "model_type"),
    ("vision_config.patch_size", 15, "patch_size"), ("vision_config.image_size", 224, "image_seq_length"),
    ("vision_config.hidden_act", "elu", "hidden_act"), ("vision_config.num_attention_heads", 3, "num_attention_heads"),
    ("projector_hidden_act", "elu", "projector_hidden_act"), ("image_token_index", 10**6, "image_token_index"),
    ("image_seq_length", 576, "image_seq_length"), ("multimodal_projector_bias", 1, "multimodal_projector_bias"),
    ("vision_config.num_hidden_layers", -1, "num_hidden_layers"), ("vision_config.layer_norm_eps", 0, "layer_norm_eps"),
])  # fmt: skip
def test_a_value_that_is_not_implemented_is_refused(
    key: str, value: Any, named: str, made: Any, tmp_path: Path
) -> None:
    folder = altered(made("plain"), tmp_path / "altered", "config.json", key, value)
    with pytest.raises(StartupError) as refused:
        load_config(folder)
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [
    ("size", {"shortest_edge": 224}), ("size", {"height": 112, "width": 112}),
    ("crop_size", {"height": 112, "width": 56}), ("do_center_crop", False), ("do_resize", False),
    ("resample", 2), ("image_processor_type", "Qwen2VLImageProcessor"),
    ("image_std", [0, 1, 1]),
])  # fmt: skip
def test_another_processor_is_refused(key: str, value: Any, made: Any, tmp_path: Path) -> None:
    folder = altered(made("plain"), tmp_path / "altered", "preprocessor_config.json", key, value)
    with pytest.raises(StartupError) as refused:
        image_processor(load_config(folder), {})
    assert (key in str(refused.value) or "shortest_edge" in str(refused.value)) and "\n" not in str(refused.value)


def test_options_that_would_resize_are_refused(made: Any) -> None:
    config = load_config(made("plain"))
    with pytest.raises(StartupError, match="max_pixels does not apply"):
        image_needs(config, {"max_pixels": 50_000})
    with pytest.raises(StartupError, match="no windows"):
        image_needs(config, {}, "resize")


def test_a_thin_image_costs_little_and_a_thinner_one_is_refused(made: Any) -> None:
    processor = image_processor(load_config(made("336")), {})
    assert processor.compute_geometry(40, 8000).area == 336 * 67_200
    with pytest.raises(BadRequest, match="aspect ratio"):
        processor.compute_geometry(1, 10_000)


def test_every_number_of_images_has_its_launches(made: Any) -> None:
    """Multiples of the tile: no launch misses, and at most a quarter of a launch's slots are padding."""
    from trencadis.backends.hpu.shape_policy import policy

    config = load_config(made("336"))
    needs = image_needs(config, {})
    assert (needs.slots, needs.tokens, needs.tile) == (640, 576, 640)
    limits = ShapeLimits(16, 2048, 2048, 128, needs.slots, needs.least_slots, needs.tile)
    plan = make_plan(policy(""), limits, BucketOptions(), config)
    assert plan.sizes(Stage.VISION) == tuple(640 * n for n in (1, 2, 3, 4, 6, 8, 12, 17))
    packer = ImagePacker(plan, ENCODER_SLOTS)
    for count in range(1, 60):
        waiting, launched = [640] * count, 0
        while waiting:
            chosen = packer.choose(waiting)
            need = 640 * len(chosen)
            assert plan.is_within_boundaries(Stage.VISION, (need,))
            launched += plan.fit(Stage.VISION, (need,)).dims[0]
            waiting = waiting[len(chosen) :]
        assert 640 * count >= 0.75 * launched


def test_a_users_buckets_are_multiples_of_the_tile(made: Any) -> None:
    from trencadis.backends.hpu.shape_policy import policy

    config = load_config(made("336"))
    limits = ShapeLimits(16, 2048, 2048, 128, 640, 640, 640)
    plan = make_plan(policy(""), limits, BucketOptions(vision=(1280, 3136)), config)
    assert plan.sizes(Stage.VISION) == (640, 1280, 2560)
    assert "3136 are rounded down" in " ".join(plan.notes)


def test_a_hub_file_that_leaves_defaults_out(made: Any, tmp_path: Path) -> None:
    """llava-1.5-7b-hf's text_config names five keys; the others are LlamaConfig's."""
    raw = json.loads((made("336") / "config.json").read_text())
    raw["text_config"] = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    raw["text_config"]["vocab_size"] = 32064
    raw |= {"image_token_index": 32000, "ignore_index": -100, "vocab_size": 32064}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(tmp_path)
    text = config.text
    assert (text.hidden, text.layers, text.heads, text.kv_heads, text.intermediate) == (4096, 32, 32, 32, 11008)
    assert (text.max_positions, text.eps, config.image_token, config.unread) == (4096, 1e-5, 32000, ())
